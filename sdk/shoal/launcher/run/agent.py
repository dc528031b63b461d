"""Core of `shoal run`: runs a script's workers on this machine, from their startup to the exit
status.

The thread that calls `run` owns all state. An asyncio loop on this thread starts processes, detects
their exits through pidfds, and carries out the decisions of `policy`. Blocking RPCs run on a small
thread pool, and output is written on the pump's thread, so that neither an unreachable coordinator
nor a stopped terminal delays the detection of a death. The `Site` determines whether the run uses
its own cluster or a coordinator shared with launchers on other machines. Running workers are
stopped only for a known reason, never because information is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from shoal_common.errors import PreconditionError, ShoalError
from shoal_common.exit_status import EVICTED
from shoal_common.system.scratch import ScratchDirectory

from shoal.launcher.machines.health import check_clock, check_machine, failures_text
from shoal.launcher.machines.metadata import Notice
from shoal.launcher.machines.notices import NoticeWatch
from shoal.launcher.processes.process import ExitStatus, stop_all
from shoal.launcher.report.account import RunFigures
from shoal.launcher.report.changes import JobEvent
from shoal.launcher.report.course import Course, history_of
from shoal.launcher.report.follower import RunFollower, Show
from shoal.launcher.report.history import Outcome
from shoal.launcher.report.summary import failure_line
from shoal.launcher.run.site import MACHINE_REFUSED, Ending, RunCompletedError, Site
from shoal.launcher.run.waits import awaited
from shoal.launcher.workers.environment import NodePlacement
from shoal.launcher.workers.output import OutputPump
from shoal.launcher.workers.policy import Action, JobEnd, RestartPolicy, WorkerExit
from shoal.launcher.workers.settings import RunSettings, Streams
from shoal.launcher.workers.worker import Worker, WorkerStarter, all_ended, named

if TYPE_CHECKING:
    from shoal.launcher.run.recorder import RunRecorder
    from shoal.launcher.run.reporter import ExitReport, ExitReporter, JobNews

T = TypeVar("T")

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_REPORT_EVERY_S: Final = 10.0
_REPORT_AGAIN_S: Final = 25.0
"""Seconds without output after which the same line about the start is printed again."""
_KILL_TIMEOUT: Final = timedelta(seconds=10)
_REPORT_TIMEOUT: Final = timedelta(seconds=10)
_NEWS_TIMEOUT: Final = timedelta(seconds=10)
_PAUSE_S: Final = 0.5
_SAME_SIGNAL_S: Final = 1.0
_LOOK_S: Final = 5.0
"""Interval in seconds between checks for evicted workers."""
_QUIET: Final = timedelta(seconds=10)
"""A worker that has committed a step within this time cannot be hung and is not checked."""
_EVICTED_GRACE: Final = timedelta(seconds=20)
"""Maximum time for an evicted worker to exit on its own. It learns of its eviction within a second
or two."""
_REPLACEMENT_DELAY: Final = timedelta(milliseconds=250)
"""Delay between the death of a worker and the start of its replacement in a fresh interpreter, if
other workers are running. The replacement imports torch, which uses the cores for a second or more;
the other workers need these cores to form their next generation."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of a run."""

    exit_code: int
    """Exit status, as in docs/exit-status.md."""
    failures: tuple[WorkerExit, ...]
    """Failures that made the run fail, ordered by time."""
    survived: tuple[WorkerExit, ...]
    """Failures that the run recovered from, because the worker was replaced or other workers
    continued."""
    stopped: str | None = None
    """Reason given for stopping the job; None if no stop was requested."""
    outcome: Outcome
    reason: str
    """Human-readable reason for the outcome; may be empty."""


class Agent:
    """Executes one run on this machine. `run` may be called once, on a thread that does not end
    before the run."""

    def __init__(
        self,
        settings: RunSettings,
        site: Site,
        *,
        pump: OutputPump,
        note: Callable[[str], None],
        colour: bool,
        show: Show | None = None,
        recorder: RunRecorder | None = None,
    ) -> None:
        """Prepares the agent; `run` starts the workers.

        Args:
            settings: settings of the run.
            site: connects the run to its coordinator and to the launchers on other machines.
            pump: pump that writes the output.
            note: callback that shows a message to the user.
            colour: True to color the prefixes of workers' lines.
            show: callback that receives the progress of the run.
            recorder: records the run for the history; None: no record.
        """
        self._settings = settings
        self._site = site
        self._pump = pump
        self._note = note
        self._recorder = recorder
        self._files = ScratchDirectory("run")
        self._starter = WorkerStarter(
            settings,
            coordinator=site.coordinator,
            directory=self._files.path,
            pump=pump,
            note=note,
            colour=colour,
        )
        self._follower = RunFollower(
            note=note, show=show, notes_stalls=not settings.logs.to_console(0, Streams.ERR)
        )
        self._policy = RestartPolicy(
            workers=settings.workers,
            max_restarts=settings.max_restarts,
            fail_fast=settings.fail_fast,
            fail_on_stop=settings.fail_on_stop,
        )
        self._workers: set[Worker] = set()
        self._asked_to_end: set[Worker] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="shoal-rpc")
        self._reporter: ExitReporter | None = None
        self._node: NodePlacement | None = None
        self._signal: signal.Signals | None = None
        self._notice: Notice | None = None
        """Notice from the cloud provider that this machine will stop; None if there was none."""
        self._signalled_at = 0.0
        """Time of the first signal, by the event loop's clock."""
        self._replacing: set[asyncio.Task[None]] = set()
        """Tasks that are about to start a replacement."""
        self._reporting: set[asyncio.Task[None]] = set()
        """Tasks that notify other launchers that the job has failed."""
        self._why = ""
        """Reason why the job is ending, as given by the coordinator."""
        self._holders: int | None = None
        """Number of members that hold the training state, as last reported by the coordinator; None
        before the first report."""
        self._ending = False
        """True once the run is ending. From then on, no further processes are started."""

    @property
    def figures(self) -> RunFigures:
        """Figures of the run so far."""
        return self._follower.account.figures

    @property
    def course(self) -> Course:
        """The run over time so far: its throughput, losses and pauses."""
        return self._follower.account.course

    def run(self) -> RunResult:
        """Runs the workers until the run has ended. Raises ShoalError if the run could not be
        started or continued, and OSError if a process could not be started. In any case, no
        processes remain."""
        ending = Ending.FAILED
        try:
            code = asyncio.run(self._run())
            if code == 0 or self._policy.was_stopped:
                ending = Ending.FINISHED
            elif self._is_interrupted or (self._policy.elastic and not self._policy.fails_job):
                ending = Ending.STOPPED
        finally:
            self._end(ending)
        return RunResult(
            exit_code=code,
            failures=tuple(self._policy.failures),
            survived=tuple(self._policy.survived),
            stopped=self._why if self._policy.was_stopped else None,
            outcome=self._outcome(code),
            reason=self._reason(),
        )

    def _outcome(self, code: int) -> Outcome:
        if self._policy.was_stopped:
            return Outcome.STOPPED
        if code == 0:
            return Outcome.COMPLETED
        interrupted = self._is_interrupted or code == EVICTED
        return Outcome.INTERRUPTED if interrupted else Outcome.FAILED

    def _reason(self) -> str:
        if self._notice is not None:
            return self._notice.text
        if self._policy.refused and self._signal is None:
            return self._policy.refused
        if self._policy.failures and self._signal is None:
            return failure_line(self._policy.failures[0])
        return self._why or ("" if self._signal is None else self._signal.name)

    @property
    def _is_interrupted(self) -> bool:
        """True if a signal or a preemption notice is ending the run on this machine."""
        return self._signal is not None or self._notice is not None

    async def _run(self) -> int:
        self._finished: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._changing = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._opened = asyncio.Event()
        self._health: asyncio.Task[str] | None = None
        if self._settings.health_checks:
            self._health = asyncio.create_task(self._check_health())
        with self._signals(), self._preemption_notices():
            self._starter.warm.begin()
            self._site.begin(self._starter.warm.start_service)
            self._spawn(self._start_over(again=False))
            self._spawn(self._open())
            self._spawn(self._report_waits())
            try:
                return await self._finished
            finally:
                health = () if self._health is None else (self._health,)
                for task in (*self._tasks, *health):
                    task.cancel()
                await asyncio.gather(*self._tasks, *health, return_exceptions=True)
                await self._starter.warm.close()
                await self._follower.finish(
                    self._ask_for_events if self._reporter is not None else None
                )
                await self._keep()

    async def _keep(self) -> None:
        """Records the coordinator's information about the run in the history, if the coordinator
        responds."""
        recorder, reporter, run = self._recorder, self._reporter, self._site.run
        if recorder is None or reporter is None:
            return
        try:
            events = await self._in_thread(lambda: reporter.events(""))
        except ShoalError:
            return
        events = [event for event in events if run is None or event.run == run.number]
        sizes = [
            int(event.attributes.get("world_size") or 0)
            for event in events
            if event.kind == "generation_formed"
        ]
        known: dict[str, Any] = {
            "newest_step": self.course.steps if self.course.has_begun else 0,
            "steps_in_all": self.course.steps_in_all,
            "world_size": sizes[-1] if sizes else 0,
            "history": history_of(
                self.course,
                ranks=sizes[-1] if sizes else 0,
                now_ns=time.monotonic_ns(),
                now_unix_ms=time.time_ns() // 1_000_000,
            ),
        }
        page = await self._in_thread(lambda: self._site.saved_page(known))
        recorder.keep(
            events=events,
            page=page,
            run=1 if run is None else run.number,
            ranks=max(sizes, default=0),
        )

    async def _ask_for_events(self, after: str) -> Sequence[JobEvent]:
        reporter = self._reporter
        assert reporter is not None, "nobody is asked before the site is open"
        return await self._in_thread(lambda: reporter.events(after))

    def _end(self, ending: Ending) -> None:
        """Stops everything that is still running, in an order that lets each process leave
        cleanly."""
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

    # ---------------------------------------------------------------------------------------- tasks

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if (
            not task.cancelled()
            and (error := task.exception()) is not None
            and not self._finished.done()
        ):
            self._finished.set_exception(error)

    async def _open(self) -> None:
        try:
            self._reporter = await self._site.open(self._starter.launcher_id)
        except RunCompletedError as over:
            self._note(str(over))
            self._finished.set_result(0)
            return
        if self._site.run is not None:
            self._follower.of_run(self._site.run.number)
        self._opened.set()
        if self._settings.endpoint is not None and (self._health is None or not await self._health):
            news = await self._in_thread(self._reporter.news)
            if news is not None and news.refused:
                self._hear(news)
                self._spawn(self._wind_down(timedelta(0)))
                return
        self._spawn(self._follow_moves())
        self._spawn(self._kill_evicted(self._reporter))
        self._spawn(self._follower.follow(self._ask_for_events))
        self._spawn(self._report_missing_servers(self._reporter))
        try:
            await self._site.keep()
        except ShoalError:
            news = await self._in_thread(self._reporter.news)
            if news is not None and news.end is JobEnd.COMPLETED and self._policy.elastic:
                self._hear(news)
                return  # the workers are exiting on their own
            self._ending = True
            await self._stop_workers(self._settings.failure_grace)
            raise

    async def _follow_moves(self) -> None:
        while True:
            await self._site.moved()
            left = self._node
            if not await self._is_elastic():
                await self._start_over(again=False, left=left)

    async def _kill_evicted(self, reporter: ExitReporter) -> None:
        """Kills evicted workers that do not exit on their own. A hung worker would keep its memory,
        block its replacement and delay the end of the run."""
        known: dict[Worker, float] = {}
        while True:
            await asyncio.sleep(_LOOK_S)
            now = asyncio.get_running_loop().time()
            for worker in [each for each in self._workers if each.may_hang(_QUIET)]:
                if not await self._in_thread(
                    functools.partial(reporter.is_evicted, worker.member_id)
                ):
                    known.pop(worker, None)  # the worker may be a member again
                elif now >= known.setdefault(worker, now) + _EVICTED_GRACE.total_seconds():
                    self._note(
                        f"worker {worker.index} (pid {worker.child.pid}) was evicted from the "
                        f"job {now - known[worker]:.0f} s ago and has not exited; killing it"
                    )
                    worker.child.kill()

    async def _report_missing_servers(self, reporter: ExitReporter) -> None:
        """Prints every ten seconds which parameter servers are missing, until the first step is
        committed."""
        while not self._follower.account.course.has_begun:
            await asyncio.sleep(_REPORT_EVERY_S)
            if missing := await self._in_thread(reporter.missing_servers):
                self._note(f"job {self._settings.job_id}: {missing}")

    async def _report_waits(self) -> None:
        """Prints what the start of the run is waiting for whenever nothing has been printed for ten
        seconds, until the first step is committed. Once the run is over, prints which workers have
        not exited yet."""
        loop = asyncio.get_running_loop()
        began = reported_at = loop.time()
        last = ""
        while not self._ending:
            await asyncio.sleep(_REPORT_EVERY_S / 10)
            # a stopped terminal has not accepted the last line yet
            quiet_s = min(self._pump.quiet_s, loop.time() - reported_at)
            seconds = loop.time() - began
            if quiet_s < _REPORT_EVERY_S:
                continue
            if self._policy.end.is_over and self._workers:
                waits = f"{named(self._workers)} to end, since the run is over"
                if waits != last:
                    last, reported_at = waits, loop.time()
                    self._note(f"waiting for {waits}")
            if self._policy.end.is_over or self._follower.account.course.has_begun:
                continue
            waits = awaited(
                checking=self._health is not None and not self._health.done(),
                importing=not self._starter.warm.is_settled,
                open_=self._reporter is not None,
                workers=self._settings.workers,
                started=len(self._workers),
                joined=sum(worker.has_joined for worker in self._workers),
                seconds=seconds,
            )
            if waits and (waits != last or quiet_s >= _REPORT_AGAIN_S):
                last, reported_at = waits, loop.time()
                self._note(f"waiting for {waits}; {seconds:.0f} s since the start")

    async def _is_elastic(self) -> bool:
        """Waits until it is known whether this launcher's workers have joined the job, and returns
        the result. Running workers are kept until then."""
        while not self._policy.elastic:
            news = (
                await self._in_thread(self._reporter.news) if self._reporter is not None else None
            )
            if any(worker.has_joined for worker in self._workers) or (
                news is not None and news.ours
            ):
                self._policy.joined()
            elif news is not None:
                return False
            else:
                await asyncio.sleep(_PAUSE_S)
        return True

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    # -------------------------------------------------------------------------------------- signals

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

    @contextlib.contextmanager
    def _preemption_notices(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def hear(notice: Notice) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self._on_notice, notice)

        watch = NoticeWatch(
            self._settings.preemption_notice,
            url=os.environ.get("SHOAL_METADATA_URL") or None,
            on_notice=hear,
            note=self._note,
        )
        try:
            yield
        finally:
            watch.close()

    def _on_notice(self, notice: Notice) -> None:
        """Makes the workers leave before the machine stops, as on SIGTERM. A notice that is only a
        warning is shown to the user."""
        if not notice.leaves or self._ending:
            self._note(notice.text)
            return
        self._notice = notice
        self._note(f"{notice.text}; the workers on this machine leave at their next step boundary")
        if (reporter := self._reporter) is not None:
            self._spawn(self._in_thread(lambda: reporter.report_leaving(notice.text)))
        self._spawn(self._wind_down(self._leave_grace()))

    def _leave_grace(self) -> timedelta:
        return self._settings.shutdown_grace(
            elastic=self._policy.elastic or any(worker.has_joined for worker in self._workers)
        )

    def _on_signal(self, number: signal.Signals) -> None:
        now = asyncio.get_running_loop().time()
        if self._signal is not None:
            if number is not signal.SIGINT and now < self._signalled_at + _SAME_SIGNAL_S:
                # a batch system or supervisor may signal several processes that all forward the
                # signal
                return
            self._note(f"received {number.name} again; killing the workers")
            for worker in self._workers:
                worker.child.kill()
            return
        self._signal, self._signalled_at = number, now
        if self._notice is not None:
            # The stopping machine sends this signal. The workers are already leaving because of the
            # notice.
            self._note(f"received {number.name}; the workers are leaving")
            return
        self._follower.interrupted()
        grace = self._leave_grace()
        if self._workers:
            self._note(
                f"received {number.name}; the workers have {grace.total_seconds():g} s to exit, "
                "and another signal kills them"
            )
        self._spawn(self._wind_down(grace))

    # -------------------------------------------------------------------------------------- workers

    async def _start_over(self, *, again: bool, left: NodePlacement | None = None) -> None:
        """Starts all workers. On later calls, stops the running workers first.

        `again`: True to make the other launchers restart their workers too. `left`: the placement
        that is no longer valid; if this launcher has a newer placement by now, does nothing.
        """
        async with self._changing:
            if self._ending:
                return
            if left is not None:
                if left is not self._node or (
                    self._workers and all(worker.has_succeeded for worker in self._workers)
                ):
                    # the script has finished here, and the coordinator is being notified
                    return
                self._note("the set of launchers changed; restarting all workers")
            await self._stop_workers(self._settings.shutdown_grace(elastic=False))
            if self._health is not None:
                failure = await (self._check_health_again() if again else self._health)
                if failure:
                    await self._leave_unhealthy(failure)
                    return
            try:
                self._node = await self._site.place(again=again)
            except PreconditionError as error:
                if error.reason != MACHINE_REFUSED:
                    raise
                self._refuse(str(error))
                self._finish_as_known()
                return
            self._starter.run = self._site.run
            await self._starter.warm.settled()
            if not self._ending:
                self._policy.started_all()
                self._stopping.clear()
                for index in range(self._settings.workers):
                    self._start(index, restarts=self._policy.restarts)

    def _start(self, index: int, *, restarts: int) -> Worker:
        assert self._node is not None
        worker = self._starter.start(index, self._node, restarts=restarts)
        self._workers.add(worker)
        self._follower.started(worker.member_id, worker.tally_file)
        self._spawn(self._watch(worker))
        return worker

    async def _watch(self, worker: Worker) -> None:
        status = await worker.child.wait()
        worker.has_succeeded = status.ok
        self._follower.ended(worker.member_id, status)
        report = await self._report(worker, status)
        self._drain(worker)
        self._workers.discard(worker)
        worker.ended.set()
        ended = worker.exit_record(status, rank=report.rank if report is not None else -1)
        if self._recorder is not None:
            self._recorder.worker_ended(ended, member_id=worker.member_id)
        self._after_exit(worker, ended, report)

    def _drain(self, worker: Worker) -> None:
        """Schedules the output of the worker's last lines, ahead of later messages. Does not wait
        for the output, since the terminal may be stopped."""
        for source in worker.sources:
            self._pump.finish(source)

    async def _report(self, worker: Worker, status: ExitStatus) -> ExitReport | None:
        """Reports a worker's exit and returns the coordinator's response. Returns None if the
        coordinator does not respond, or if its response is no longer needed."""
        reporter = self._reporter
        if reporter is None:
            return None
        answer = asyncio.ensure_future(
            self._in_thread(
                lambda: reporter.report(
                    worker.member_id, status, key=worker.member_key, finished=worker.has_finished
                )
            )
        )
        stopping = asyncio.ensure_future(self._stopping.wait())
        first: list[asyncio.Future[Any]] = [answer, stopping]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        return answer.result() if answer.done() else None

    def _after_exit(self, worker: Worker, ended: WorkerExit, report: ExitReport | None) -> None:
        policy = self._policy
        self._holders = None
        if report is not None:
            self._hear(report.job)
        if ended.status.ok and worker.has_finished:
            policy.finished()
        action = policy.exited(
            ended,
            elastic=worker.has_joined
            or (report is not None and (report.was_member or report.job.ours > 0)),
        )
        if policy.fails_job and policy.fatal is ended:
            self._report_failure(worker, ended)
        what = f"{ended.who} (pid {ended.pid}) ended with {ended.status}"
        if action is Action.REPLACE:
            self._replace(ended.index, what)
        elif action is Action.RESTART_ALL:
            self._stopping.set()
            self._note(
                f"{what}; restarting all workers, restart {policy.restarts} of "
                f"{self._settings.max_restarts}"
            )
            self._spawn(self._start_over(again=True))
        elif action is Action.STOP:
            self._stopping.set()
            if policy.elastic:
                self._note(
                    f"{what}: it raised an exception, which a restarted worker would probably "
                    "raise too, so the job ends; --no-fail-fast lets the other workers "
                    "continue, --max-restarts allows restarts"
                )
            self._spawn(self._wind_down(self._settings.failure_grace))
        elif not self._stopping.is_set():
            if not self._workers and (policy.end.is_over or not self._replacing):
                self._conclude(known=report is not None)
            elif not ended.left:
                self._note(f"{what}; continuing without it")

    async def _check_health(self) -> str:
        """Runs the health checks of this machine, and compares its clock with the clock of the
        coordinator. Returns the failed checks with their reasons; empty if all passed. If the job
        has refused this machine because of its health, and all checks pass, the machine is
        readmitted."""
        results = await check_machine()
        await self._opened.wait()
        reporter = self._reporter
        assert reporter is not None, "set before the site counts as open"
        if (clock := await self._in_thread(reporter.clock_offset)) is not None:
            results.append(check_clock(*clock))
        if failure := failures_text(results):
            return failure
        self._note(f"all {len(results)} health checks of this machine passed")
        news = await self._in_thread(reporter.news)
        if news is not None and news.unhealthy:
            await self._in_thread(functools.partial(reporter.report_health, ""))
        return ""

    async def _check_health_again(self) -> str:
        """Runs the health checks, or waits for checks in progress, so that workers that die
        together share them."""
        if self._health is None or self._health.done():
            self._health = asyncio.create_task(self._check_health())
        return await asyncio.shield(self._health)

    async def _leave_unhealthy(self, failure: str) -> None:
        """Reports that this machine is unhealthy, and ends the run here. The job may continue on
        other machines."""
        reporter = self._reporter
        if self._ending or reporter is None:
            return
        await self._in_thread(functools.partial(reporter.report_health, failure))
        self._refuse(f"this machine failed its health checks: {failure}")
        self._spawn(self._wind_down(self._leave_grace()))

    def _replace(self, index: int, what: str) -> None:
        task = self._spawn(self._start_replacement(index, what))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _start_replacement(self, index: int, what: str) -> None:
        if self._health is not None and (failure := await self._check_health_again()):
            self._note(f"{what}; not replaced")
            await self._leave_unhealthy(failure)
            return
        if self._workers and not self._starter.warm.is_ready:
            await asyncio.sleep(_REPLACEMENT_DELAY.total_seconds())
        pid = self._start(index, restarts=self._policy.replaced(index)).child.pid
        if self._holders == 0:
            self._note(
                f"{what}; NO WORKER THAT HOLDS THE TRAINING STATE IS LEFT: its replacement "
                f"(pid {pid}) can continue only from a checkpoint"
            )
        else:
            self._note(f"{what}; continuing, replaced by pid {pid}")

    # ------------------------------------------------------------------------------- end of the run

    def _conclude(self, *, known: bool) -> None:
        """Ends the run if no workers are left and none will be started. `known`: True if the
        coordinator has just reported the state of the job."""
        policy, job = self._policy, self._settings.job_id
        if (
            policy.elastic
            and policy.end in (JobEnd.NONE, JobEnd.UNKNOWN)
            and not policy.failures
            and not policy.refused
        ):
            if known:
                self._note(
                    f"job {job} is not finished: the last workers on this machine left "
                    f"because they were asked to (exit status {EVICTED})"
                )
            else:
                self._note(
                    f"cannot tell whether job {job} is finished: its workers on this machine "
                    f"ended, and the coordinator at {self._site.coordinator} does not respond"
                )
        if self._reporting:
            self._spawn(self._wind_down(timedelta(0)))
        else:
            self._finish_as_known()

    def _report_failure(self, worker: Worker, ended: WorkerExit) -> None:
        """Reports a failed worker to the coordinator, so that it stops all workers of the job. Also
        notifies the other launchers."""
        reporter = self._reporter
        if reporter is None:
            return

        def tell() -> None:
            reporter.report(
                worker.member_id, ended.status, key=worker.member_key, failure=failure_line(ended)
            )
            self._site.fail(failure_line(ended))

        task = self._spawn(self._in_thread(tell))
        self._reporting.add(task)
        task.add_done_callback(self._reporting.discard)

    async def _wind_down(self, grace: timedelta) -> None:
        self._ending = True
        await self._stop_workers(grace)
        await self._hear_the_end()
        self._finish_as_known()

    async def _hear_the_end(self) -> None:
        """Waits, for a few seconds at most, until other launchers have been notified of a failure
        and it is known whether the job is finished."""
        reporter = self._reporter
        if self._reporting:
            await asyncio.wait(self._reporting, timeout=_REPORT_TIMEOUT.total_seconds())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_NEWS_TIMEOUT.total_seconds()):
                while (
                    reporter is not None and self._policy.elastic and not self._policy.end.is_over
                ):
                    news = await self._in_thread(reporter.news)
                    if news is not None:
                        self._hear(news)
                        return
                    await asyncio.sleep(_PAUSE_S)

    def _hear(self, news: JobNews) -> None:
        self._policy.heard(news.end)
        self._why, self._holders = news.why, news.holders
        if news.refused:
            self._refuse(f"job {self._settings.job_id} refuses this machine: {news.refused}")

    def _refuse(self, why: str) -> None:
        if not self._policy.refused:
            self._policy.refused = why
            self._note(f"{why} (exit status {EVICTED})")

    def _finish_as_known(self) -> None:
        stopped_by = signal.SIGTERM if self._notice is not None else self._signal
        code = self._policy.exit_code(signal_number=stopped_by or 0)
        if self._policy.end is JobEnd.FAILED and self._policy.fatal is None:
            self._note(
                f"job {self._settings.job_id} failed: {self._why}; the same command begins a "
                "new run"
            )
        if not self._finished.done():
            self._finished.set_result(code)

    async def _stop_workers(self, grace: timedelta) -> None:
        """Stops all workers: sends SIGTERM, which makes elastic workers leave at their next step
        boundary, and SIGKILL when `grace` has passed."""
        self._policy.stopping()
        self._stopping.set()
        for replacement in self._replacing:
            replacement.cancel()
        for worker in self._workers - self._asked_to_end:
            worker.child.send(signal.SIGTERM)
        self._asked_to_end |= self._workers
        if not await all_ended(self._workers, grace, note=self._note):
            self._note(
                f"killing {named(self._workers)} after {grace.total_seconds():g} s "
                "(--shutdown-timeout); a checkpoint that is still being written will be discarded, "
                "and the previous one kept"
            )
            for worker in self._workers:
                worker.child.kill()
            await all_ended(self._workers, _KILL_TIMEOUT, note=self._note)
