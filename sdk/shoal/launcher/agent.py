"""Runs a script's workers on this machine, from their start to the run's exit status: what `shoal run` does.

The thread that calls `run` owns everything: an asyncio loop on it starts the processes, hears of their ends through pidfds, and acts as
`policy` decides. RPCs that block go to a small pool of threads, and output to the pump's thread, so neither the coordinator's absence nor
a terminal that stands still delays the notice of a death. Where the run takes place, alone or among launchers of other machines, is the
`Site`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, Protocol

from shoal_common.scratch import ScratchDirectory

from shoal.launcher.environment import NodePlacement
from shoal.launcher.output import OutputPump
from shoal.launcher.policy import Action, RestartPolicy, WorkerExit
from shoal.launcher.process import ExitStatus, stop_all
from shoal.launcher.settings import RunSettings
from shoal.launcher.workers import Worker, WorkerStarter

if TYPE_CHECKING:
    from shoal.launcher.reporter import ExitReport, ExitReporter

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_KILL_TIMEOUT: Final = timedelta(seconds=10)
_REPLACEMENT_DELAY: Final = timedelta(milliseconds=250)
"""Between a worker's death and its replacement's start, while others run: a new process imports torch for a second or more, on the cores
on which the others are forming their next generation."""


class Ending(Enum):
    """How a run ended, towards other launchers."""

    FINISHED = auto()
    """The script came to its end."""
    FAILED = auto()
    STOPPED = auto()
    """By a signal: this launcher goes, the job may go on elsewhere."""


class Site(Protocol):
    """Where a run takes place: on a cluster of its own (`standalone`), or at a coordinator that several launchers share (`nodes`)."""

    coordinator: str
    """host:port, told to the workers."""

    def begin(self) -> None:
        """Starts what takes time. Called first, on the loop's thread."""
        ...

    async def open(self, launcher_id: str) -> ExitReporter:
        """Waits until the coordinator is reachable and the job is known to it. Raises ShoalError."""
        ...

    async def keep(self) -> None:
        """Looks after the site until cancelled; called once it is open."""
        ...

    async def place(self, *, again: bool) -> NodePlacement:
        """This launcher's place at the next start of all its workers; may be called before the site is open. Waits for other launchers,
        whose workers must start anew too if `again`. Raises ShoalError."""
        ...

    async def moved(self) -> None:
        """Returns when the place given last does not hold any more, since launchers came or went."""
        ...

    def close(self, ending: Ending) -> None:
        """Takes leave, and ends whatever the site started. Blocks. Raises ShoalError."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended."""

    exit_code: int
    """0; else that of the first worker whose failure was not outlived, or 128 + the signal that ended the run."""
    failures: tuple[WorkerExit, ...]
    """Those that made it fail, first one first."""
    survived: tuple[WorkerExit, ...]
    """Those that other workers outlived."""


class Agent:
    """One run. `run` may be called once, on a thread that lives as long as the run."""

    def __init__(self, settings: RunSettings, site: Site, *, pump: OutputPump, note: Callable[[str], None], colour: bool) -> None:
        """`note` tells a person what happens; `colour`: the workers' prefixes are for a terminal."""
        self._settings = settings
        self._site = site
        self._pump = pump
        self._note = note
        self._files = ScratchDirectory("run")
        self._starter = WorkerStarter(settings, coordinator=site.coordinator, directory=self._files.path, pump=pump, colour=colour)
        self._policy = RestartPolicy(workers=settings.workers, max_restarts=settings.max_restarts)
        self._workers: set[Worker] = set()
        self._asked_to_end: set[Worker] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="shoal-rpc")
        self._reporter: ExitReporter | None = None
        self._node: NodePlacement | None = None
        self._signal: signal.Signals | None = None
        self._replacing: set[asyncio.Task[None]] = set()
        """Replacements that are about to start."""
        self._ending = False
        """The run is being ended: nothing is started any more."""

    def run(self) -> RunResult:
        """Runs to the end. Raises ShoalError when the run could not be started or kept up, OSError when a process could not be started.
        Either way nothing is left running."""
        ending = Ending.FAILED
        try:
            code = asyncio.run(self._run())
            ending = Ending.STOPPED if self._signal is not None else Ending.FAILED if code else Ending.FINISHED
        finally:
            self._end(ending)
        return RunResult(exit_code=code, failures=tuple(self._policy.failures), survived=tuple(self._policy.survived))

    async def _run(self) -> int:
        self._finished: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._changing = asyncio.Lock()
        self._stopping = asyncio.Event()
        with self._signals():
            self._site.begin()
            self._spawn(self._start_over(again=False))
            self._spawn(self._open())
            try:
                return await self._finished
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    def _end(self, ending: Ending) -> None:
        """Ends what still runs, in the order that lets each take its leave."""
        if self._reporter is not None:
            self._reporter.close()
        try:
            stop_all([worker.child for worker in self._workers], grace=timedelta(0))
            for worker in self._workers:
                self._drain(worker)
        finally:
            self._threads.shutdown(cancel_futures=True)
            try:
                self._site.close(ending)
            finally:
                self._files.close()

    # ----------------------------------------------------------------------------------------------------------- tasks

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._finished.done():
            self._finished.set_exception(error)

    def _finish(self, code: int) -> None:
        if not self._finished.done():
            self._finished.set_result(code)

    async def _open(self) -> None:
        self._reporter = await self._site.open(self._starter.launcher_id)
        self._spawn(self._follow_moves())
        await self._site.keep()

    async def _follow_moves(self) -> None:
        assert self._reporter is not None
        loop = asyncio.get_running_loop()
        while True:
            await self._site.moved()
            left = self._node
            if not await loop.run_in_executor(self._threads, self._reporter.has_members):
                await self._start_over(again=False, left=left)

    # --------------------------------------------------------------------------------------------------------- signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handled = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
        for number in handled:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._signal is not None:
            self._note(f"{number.name} again: killing the workers")
            for worker in self._workers:
                worker.child.kill()
            return
        self._signal = number
        if self._workers:
            grace = self._settings.shutdown_grace.total_seconds()
            self._note(f"{number.name}: the workers have {grace:g} s to end by themselves; once more kills them")
        self._spawn(self._wind_down(128 + number))

    # --------------------------------------------------------------------------------------------------------- workers

    async def _start_over(self, *, again: bool, left: NodePlacement | None = None) -> None:
        """Starts all workers: the first time, or after stopping those that run.

        `left` is the place that does not hold any more; if there is another one by now, all is done.
        """
        async with self._changing:
            if left is not None:
                if left is not self._node:
                    return
                self._note("the set of launchers has changed: starting all workers anew")
            await self._stop_workers()
            self._node = await self._site.place(again=again)
            if not self._ending:
                self._policy.started_all()
                self._stopping.clear()
                for index in range(self._settings.workers):
                    self._start(index, restarts=self._policy.restarts)

    def _start(self, index: int, *, restarts: int) -> Worker:
        assert self._node is not None
        worker = self._starter.start(index, self._node, restarts=restarts)
        self._workers.add(worker)
        self._spawn(self._watch(worker))
        return worker

    async def _watch(self, worker: Worker) -> None:
        status = await worker.child.wait()
        report = await self._report(worker, status)
        self._drain(worker)
        self._workers.discard(worker)
        worker.ended.set()
        self._after_exit(worker.exit_record(status), report)

    def _drain(self, worker: Worker) -> None:
        """Its last output comes before anything noted from now on. Does not wait for that: the terminal may stand still."""
        for source in worker.sources:
            self._pump.finish(source)

    async def _report(self, worker: Worker, status: ExitStatus) -> ExitReport | None:
        """What the coordinator says of it; None if it cannot have known it, or if that matters no more."""
        if self._reporter is None:
            return None
        answer = asyncio.get_running_loop().run_in_executor(self._threads, self._reporter.report, worker.member_id, status)
        stopping = asyncio.ensure_future(self._stopping.wait())
        first: list[asyncio.Future[Any]] = [answer, stopping]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        return answer.result() if answer.done() else None

    def _after_exit(self, worker: WorkerExit, report: ExitReport | None) -> None:
        elastic, over = (report.elastic, report.over) if report is not None else (False, False)
        action = self._policy.exited(worker, elastic=elastic, over=over)
        what = f"rank {worker.rank} (pid {worker.pid}) ended with {worker.status}"
        if action is Action.REPLACE:
            self._replace(worker.index, what)
        elif action is Action.RESTART_ALL:
            self._stopping.set()
            self._note(f"{what}; starting all workers anew, restart {self._policy.restarts} of {self._settings.max_restarts}")
            self._spawn(self._start_over(again=True))
        elif action is Action.STOP:
            self._stopping.set()
            self._spawn(self._wind_down(worker.status.code))
        elif not self._stopping.is_set():
            if not self._workers and (over or not self._replacing):
                if worker.status.ok and elastic and not over:
                    self._note(f"job {self._settings.job_id} is not finished: its last workers here were asked to leave, and did")
                self._finish(self._policy.exit_code)
            elif not worker.status.ok:
                self._note(f"{what}; the others go on without it")

    def _replace(self, index: int, what: str) -> None:
        task = self._spawn(self._start_replacement(index, what))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _start_replacement(self, index: int, what: str) -> None:
        if self._workers:
            await asyncio.sleep(_REPLACEMENT_DELAY.total_seconds())
        replacement = self._start(index, restarts=self._policy.replaced(index))
        self._note(f"{what}; the others go on, pid {replacement.child.pid} takes its place")

    async def _wind_down(self, code: int) -> None:
        self._ending = True
        await self._stop_workers()
        self._finish(code if self._signal is None else 128 + self._signal)

    async def _stop_workers(self) -> None:
        """SIGTERM, on which elastic workers leave at their next border, and SIGKILL after the grace."""
        self._policy.stopping()
        self._stopping.set()
        for replacement in self._replacing:
            replacement.cancel()
        for worker in self._workers - self._asked_to_end:
            worker.child.send(signal.SIGTERM)
        self._asked_to_end |= self._workers
        if not await self._all_ended(self._settings.shutdown_grace):
            for worker in self._workers:
                worker.child.kill()
            await self._all_ended(_KILL_TIMEOUT)

    async def _all_ended(self, timeout: timedelta) -> bool:
        waits = [asyncio.ensure_future(worker.ended.wait()) for worker in self._workers]
        if not waits:
            return True
        _, pending = await asyncio.wait(waits, timeout=timeout.total_seconds())
        for wait in pending:
            wait.cancel()
        return not pending
