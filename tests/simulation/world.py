"""One run: the scheduler, the coordinator, the processes and what lies between them; and what was
seen to be wrong on the way."""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal_common.exit_status import PUT_OUT
from shoal_coordinator.membership.model.events import ExitReported
from shoal_coordinator.membership.model.spec import JobSpec

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
"""Virtual seconds without a step, or an end, after which a run hangs."""
_LOOK_S = 10.0
_REPLACED_AFTER_S = 0.3
_TOLD_AGAIN_AFTER_S = 1.0


class World:
    """All of one run."""

    def __init__(
        self,
        scenario: Scenario,
        script: Callable[[Process], None],
        options: dict[str, Any],
        *,
        keeps_trails: bool = False,
    ) -> None:
        """`options`: what the script gives to its strategy, by which the state lies on the
        ranks."""
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
        """The first of those that ran in a process's place one after the other."""
        self._due = 0
        """Processes that are about to be started in the place of others."""
        self.donors: dict[str, SimulatedDonor] = {}
        self.stores: dict[str, dict[str, Any]] = {}
        self.violations: list[tuple[str, str]] = []
        """Kind, and what was seen."""
        self.timeouts: list[str] = []
        self.notes: list[str] = []
        self.tracebacks: list[str] = []
        self.collectives: Counter[int] = Counter()
        """How many each generation has had."""
        self.first_collectives: dict[int, int] = {}
        """For each number of committed steps: the first collective after the step, where no fault
        is."""
        self.first_points: dict[int, int] = {}
        """For each number of committed steps: the first point of the first process after the
        step."""
        self.at_end: Callable[[], None] = lambda: None
        """Called before the files of the run are removed."""
        self.steps = 0
        """The most that a process has committed."""
        self.losses: list[tuple[Process, float]] = []
        """Who was killed, or stood still until its peers went on without it, and when."""
        self.departures: list[tuple[Process, float]] = []
        """Who was asked to leave and left, while others went on, and when."""
        self.absences: list[tuple[float, float]] = []
        """From when to when the coordinator was away."""
        self.stopped_at: float | None = None
        """When the coordinator heard that the job is to stop."""
        self.holdings = Holdings(self, options)
        self._script = script
        self._rooms: dict[str, Room] = {}
        self._moved_at = 0.0
        self.coordinator = Coordinator(
            self, JobSpec(job_id="job", min_workers=1, max_workers=8, join_grace_ms=500)
        )

    def run(self) -> None:
        """To its end."""
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
        """Lets go of groups and sessions, once they have ended. What was noted down stays."""
        for room in self._rooms.values():
            vars(room).clear()
        for process in self.processes:
            process.session = process.membership = process.stream = None
            process.sides.clear()

    # ------------------------------------------------------------------------------------ processes

    def start_process(self, *, in_place_of: Process | None = None) -> Process:
        """One more worker."""
        process = Process(self, "abcdefghijklmnopqrstuvwxyz"[len(self.processes)])
        self.processes.append(process)
        if in_place_of is not None:
            self._in_place_of[process] = self._in_place_of.get(in_place_of, in_place_of)
        self.note(f"{process.name} starts")
        process.start(self._script)
        return process

    def process_ended(self, process: Process) -> None:
        """It died or has ended: its launcher notices, and may start another."""
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
        started_again = process.exit_code == PUT_OUT  # by its launcher, also if it was the last
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
        """Its peers have to go on without what it holds."""
        if all(one is not process for one, _ in self.losses):
            self.losses.append((process, self.scheduler.now))

    def away_since(self, at: float, seconds: float) -> bool:
        """At that moment the coordinator had been away for so long."""
        return any(begin + seconds <= at <= end for begin, end in self.absences)

    def left_out(self, member_id: str) -> None:
        """The coordinator has no such member any more: one that stands still is lost to its
        peers."""
        for process in self.processes:
            if process.name == member_id and (process.still_until > self.scheduler.now):
                self.lost(process)

    def kept_out(self, member_id: str) -> None:
        """The coordinator lets its peers go on without it, since it does not reach one of them."""
        for process in self.processes:
            if process.name == member_id:
                self.lost(process)

    def _report(self, report: ExitReported) -> None:
        """A launcher tells, for as long as it takes."""
        if self.coordinator.away:
            self.scheduler.after(_TOLD_AGAIN_AFTER_S, lambda: self._report(report))
        else:
            self.coordinator.submit(report)

    def _replace(self, former: Process, *, even_alone: bool) -> None:
        self._due -= 1
        if even_alone or any(not one.gone for one in self.processes):
            self.start_process(in_place_of=former)
        elif not self._due:
            self.scheduler.finish("all have ended")

    def stand_still(self, process: Process, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later. Called by its main thread."""
        until = self.scheduler.now + seconds
        process.still_until = until
        process.stood_still_s = max(process.stood_still_s, seconds)
        self.scheduler.sleep(seconds)

    def make_client(self, process: Process) -> Any:
        """Returns what it reaches the coordinator by."""
        return SimulatedClient(process, self.coordinator)

    def make_donor(self, process: Process) -> Any:
        """Returns what gives its state to peers."""
        return SimulatedDonor(process)

    def host_of(self, process: Process) -> str:
        """Two processes a host. One that takes the place of another runs where that did."""
        return f"host-{self.processes.index(self._in_place_of.get(process, process)) // 2}"

    # -------------------------------------------------------------------------------------- network

    def room(self, name: str, size: int) -> Room:
        """Returns where the ranks meet that connect over the store `name`."""
        actor = current_actor()
        if actor is not None and actor.host.dead:
            raise Killed
        if name not in self._rooms:
            self._rooms[name] = Room(self, name, size)
        return self._rooms[name]

    @staticmethod
    def generation_of(room: str) -> int:
        """Rooms are named by generation, nonce and part."""
        return int(room.split("-")[0])

    def count_collective(self, room: str) -> int:
        """The number of the next collective of the room's generation."""
        self.collectives[self.generation_of(room)] += 1
        return self.collectives[self.generation_of(room)]

    def delay(self, shortest: float, longest: float) -> float:
        """Returns how long something takes, in seconds."""
        return shortest + (longest - shortest) * self.scheduler.random.random()

    # --------------------------------------------------------------------------------- what is seen

    def moved(self) -> None:
        """A step was taken, or a process ended: the run does not hang."""
        self._moved_at = self.scheduler.now

    def step_ended(self, process: Process, steps: int) -> None:
        """A process has committed so many steps."""
        self.moved()
        ended = [
            one
            for one in self.processes
            if one.diary.ended_with is not None and one.diary.ended_with["steps"] > steps
        ]
        if process.late and ended:
            self.violated(
                "restarted",
                f"{process.name} takes step {steps}, after which {ended[0].name} has come to its "
                "end",
            )
        self.steps = max(self.steps, steps)
        self.first_collectives.setdefault(steps, self.collectives[1] + 1)
        if process is self.processes[0]:
            self.first_points.setdefault(steps, process.points + 1)

    def note(self, text: str) -> None:
        """For who reads what happened."""
        self.notes.append(f"{self.scheduler.now:9.4f}  {text}")

    def violated(self, kind: str, text: str) -> None:
        """Something that must never be was seen."""
        self.note(f"VIOLATED: {text}")
        self.violations.append((kind, text))

    def timed_out(self, what: str) -> None:
        """Somebody has waited in vain for a whole timeout."""
        self.note(f"timed out: {what}")
        self.timeouts.append(what)

    def error_of(self, process: Process, error: BaseException) -> None:
        """A process fails."""
        self.tracebacks.append(f"{process.name}: " + "".join(traceback.format_exception(error)))

    def _look(self) -> None:
        if self.scheduler.now - self._moved_at > PATIENCE_S:
            self.scheduler.finish(f"no step for {PATIENCE_S:g} s")
        self.scheduler.after(_LOOK_S, self._look)


def _memory() -> str | None:
    """A directory in memory, where there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
