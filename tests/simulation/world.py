"""One run: its scheduler, coordinator, processes and network, and the violations seen during it."""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal_common.exit_status import EVICTED
from shoal_coordinator.membership.model.events import ExitReported
from shoal_coordinator.membership.model.spec import JobSpec

from tests.one_core import one_core
from tests.simulation.coordinator import Coordinator, SimulatedClient
from tests.simulation.faults import Faults
from tests.simulation.holdings import Holdings
from tests.simulation.network import Network
from tests.simulation.processes import Process
from tests.simulation.rooms import Room
from tests.simulation.scenario import Scenario
from tests.simulation.scheduler import Killed, Scheduler, current_actor
from tests.simulation.transfers import SimulatedDonor

PATIENCE_S = 200.0
"""Virtual seconds without a step or the end of a process after which a run counts as hanging."""
_LOOK_S = 10.0
_REPLACED_AFTER_S = 0.3
_REPORTED_AGAIN_AFTER_S = 1.0


class World:
    """The complete state of one run."""

    def __init__(
        self,
        scenario: Scenario,
        script: Callable[[Process], None],
        options: dict[str, Any],
        *,
        keeps_trails: bool = False,
    ) -> None:
        """options: the strategy's options, which determine the layout of state over the ranks."""
        self.scenario = scenario
        self.scheduler = Scheduler(scenario.schedule)
        self.keeps_trails = keeps_trails
        self.directory = Path(tempfile.mkdtemp(prefix="shoal-simulated-", dir=_memory()))
        self.records = self.directory / "records"
        self.checkpoints = self.directory / "checkpoints"
        self.faults = Faults(self, scenario.faults)
        self.network = Network(self)
        self.processes: list[Process] = []
        self._in_place_of: dict[Process, Process] = {}
        """Replacement -> first process in its chain of replacements."""
        self._due = 0
        """Number of replacements that are about to start."""
        self.donors: dict[str, SimulatedDonor] = {}
        self.stores: dict[str, dict[str, Any]] = {}
        self.violations: list[tuple[str, str]] = []
        """Pairs of kind and description."""
        self.timeouts: list[str] = []
        self.notes: list[str] = []
        self.tracebacks: list[str] = []
        self.collectives: Counter[int] = Counter()
        """Number of collectives per generation."""
        self.first_collectives: dict[int, int] = {}
        """Number of the first collective after each committed step, in a run without faults."""
        self.first_points: dict[int, int] = {}
        """Number of the first process's first point after each committed step."""
        self.at_end: Callable[[], None] = lambda: None
        """Callback before the files of the run are removed."""
        self.steps = 0
        """Largest number of steps that any process has committed."""
        self.losses: list[tuple[Process, float]] = []
        """Processes that were killed, or stopped until their peers continued without them, and
        when."""
        self.departures: list[tuple[Process, float]] = []
        """Processes that were drained and left while others continued, and when."""
        self.absences: list[tuple[float, float]] = []
        """Intervals in which the coordinator was away."""
        self.stopped_at: float | None = None
        """Time at which the coordinator received the request to stop the job."""
        self.holdings = Holdings(self, options)
        self._script = script
        self._rooms: dict[str, Room] = {}
        self._moved_at = 0.0
        self.coordinator = Coordinator(
            self, JobSpec(job_id="job", min_workers=1, max_workers=8, join_grace_ms=500)
        )

    @one_core()
    def run(self) -> None:
        """Runs the scenario to its end."""
        try:
            for _ in range(self.scenario.ranks):
                self.start_process()
            self.scheduler.after(_LOOK_S, self._look)
            self.scheduler.run()
            if self.scheduler.over != "all have ended":
                self.violations.append(
                    ("hang", "; ".join([self.scheduler.over or "", *self.scheduler.stuck]))
                )
            self.at_end()
        finally:
            for process in self.processes:
                for record in process.files:
                    record.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    def forget(self) -> None:
        """Releases groups and sessions after the run. Records stay."""
        for room in self._rooms.values():
            vars(room).clear()
        for process in self.processes:
            process.session = process.membership = process.stream = None
            process.sides.clear()

    # ------------------------------------------------------------------------------------ processes

    def start_process(self, *, in_place_of: Process | None = None) -> Process:
        """Starts one more worker process."""
        process = Process(self, "abcdefghijklmnopqrstuvwxyz"[len(self.processes)])
        self.processes.append(process)
        if in_place_of is not None:
            self._in_place_of[process] = self._in_place_of.get(in_place_of, in_place_of)
        self.note(f"{process.name} starts")
        process.start(self._script)
        return process

    def process_ended(self, process: Process) -> None:
        """Handles a process's death or end: its launcher notices and may start a replacement."""
        self.moved()
        others = [one for one in self.processes if not one.gone]
        if process.dead:
            self.lost(process)
        elif (
            process.asked_at is not None
            and process.exit_code == 0
            and process.diary.ended_with is None
            and others
        ):
            self.departures.append((process, self.scheduler.now))
        code = process.exit_code or 0
        status = (
            {"exit_code": 0, "signal": code - 128}
            if code > 128
            else {"exit_code": code, "signal": 0}
        )
        report = ExitReported(member_id=process.name, finished=process.has_finished, **status)
        self.scheduler.after(self.delay(0.002, 0.02), lambda: self._report(report))
        started_again = process.exit_code == EVICTED  # by its launcher, also if it was the last
        replaced = (
            self.scenario.replaced
            and (process.dead or started_again)
            and len(self.processes) < 2 * self.scenario.ranks
        )
        if replaced and (started_again or others):
            self._due += 1
            self.scheduler.after(
                _REPLACED_AFTER_S, lambda: self._replace(process, even_alone=started_again)
            )
        elif not others and not self._due:
            self.scheduler.finish("all have ended")

    def lost(self, process: Process) -> None:
        """Records that the peers of `process` continue without its state."""
        if all(one is not process for one, _ in self.losses):
            self.losses.append((process, self.scheduler.now))

    def away_since(self, at: float, seconds: float) -> bool:
        """Returns whether the coordinator had been away for at least `seconds` at time `at`."""
        return any(begin + seconds <= at <= end for begin, end in self.absences)

    def left_out(self, member_id: str) -> None:
        """Handles a member's removal. If the member is stopped, its peers have lost its state."""
        for process in self.processes:
            if process.name == member_id and (process.stopped_until > self.scheduler.now):
                self.lost(process)

    def kept_out(self, member_id: str) -> None:
        """Handles a member's quarantine: its peers continue without it, as one of them is out of
        reach."""
        for process in self.processes:
            if process.name == member_id:
                self.lost(process)

    def _report(self, report: ExitReported) -> None:
        """Delivers a launcher's report, repeated until the coordinator is back."""
        if self.coordinator.away:
            self.scheduler.after(_REPORTED_AGAIN_AFTER_S, lambda: self._report(report))
        else:
            self.coordinator.submit(report)

    def _replace(self, former: Process, *, even_alone: bool) -> None:
        self._due -= 1
        if even_alone or any(not one.gone for one in self.processes):
            self.start_process(in_place_of=former)
        elif not self._due:
            self.scheduler.finish("all have ended")

    def stop_for(self, process: Process, seconds: float) -> None:
        """Stops a process (SIGSTOP) and continues it later (SIGCONT). Called by its main thread."""
        until = self.scheduler.now + seconds
        process.stopped_until = until
        process.stopped_for_s = max(process.stopped_for_s, seconds)
        self.scheduler.sleep(seconds)

    def make_client(self, process: Process) -> Any:
        """Returns a coordinator client for `process`."""
        return SimulatedClient(process, self.coordinator)

    def make_donor(self, process: Process) -> Any:
        """Returns a state donor for `process`."""
        return SimulatedDonor(process)

    def host_of(self, process: Process) -> str:
        """Returns the host of a process: two processes per host. A replacement runs where its
        predecessor ran."""
        return f"host-{self.processes.index(self._in_place_of.get(process, process)) // 2}"

    # -------------------------------------------------------------------------------------- network

    def room(self, name: str, size: int) -> Room:
        """Returns the room of the ranks that connect over the store `name`."""
        actor = current_actor()
        if actor is not None and actor.host.dead:
            raise Killed
        if name not in self._rooms:
            self._rooms[name] = Room(self, name, size)
        return self._rooms[name]

    @staticmethod
    def generation_of(room: str) -> int:
        """Returns the generation of a room, whose name consists of generation, nonce and part."""
        return int(room.split("-")[0])

    def count_collective(self, room: str) -> int:
        """Returns the number of the next collective in the room's generation."""
        self.collectives[self.generation_of(room)] += 1
        return self.collectives[self.generation_of(room)]

    def delay(self, shortest: float, longest: float) -> float:
        """Draws a duration in seconds."""
        return shortest + (longest - shortest) * self.scheduler.random.random()

    # --------------------------------------------------------------------------------- what is seen

    def moved(self) -> None:
        """Records progress: a step was taken or a process ended, so the run does not hang."""
        self._moved_at = self.scheduler.now

    def step_ended(self, process: Process, steps: int) -> None:
        """Records that a process has committed `steps` steps."""
        self.moved()
        ended = [
            one
            for one in self.processes
            if one.diary.ended_with is not None and one.diary.ended_with["steps"] > steps
        ]
        if process.late and ended:
            self.violated(
                "restarted",
                f"{process.name} takes step {steps}, after {ended[0].name} has come to its end",
            )
        self.steps = max(self.steps, steps)
        self.first_collectives.setdefault(steps, self.collectives[1] + 1)
        if process is self.processes[0]:
            self.first_points.setdefault(steps, process.points + 1)

    def note(self, text: str) -> None:
        """Adds a line to the run's history."""
        self.notes.append(f"{self.scheduler.now:9.4f}  {text}")

    def violated(self, kind: str, text: str) -> None:
        """Records a violation."""
        self.note(f"VIOLATED: {text}")
        self.violations.append((kind, text))

    def timed_out(self, what: str) -> None:
        """Records a wait that lasted its whole timeout."""
        self.note(f"timed out: {what}")
        self.timeouts.append(what)

    def error_of(self, process: Process, error: BaseException) -> None:
        """Records the traceback of a failed process."""
        self.tracebacks.append(f"{process.name}: " + "".join(traceback.format_exception(error)))

    def _look(self) -> None:
        if self.scheduler.now - self._moved_at > PATIENCE_S:
            self.scheduler.finish(f"no step for {PATIENCE_S:g} s")
        self.scheduler.after(_LOOK_S, self._look)


def _memory() -> str | None:
    """Returns a directory in memory, if the machine has one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
