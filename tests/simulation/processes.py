"""Simulated worker processes. Each runs the product's own session, membership, link, loaders and
strategy on threads that take turns.

A process dies at once, wherever it is. Its connections close, each of its threads ends at its next
wait, and no other process receives anything that they do on the way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from shoal_common.exit_status import EVICTED
from shoal_worker.backends import worlds
from shoal_worker.data.record import SampleRecord
from shoal_worker.elastic.contract.generation import MemberIdentity
from shoal_worker.elastic.coordinator.membership import Membership
from shoal_worker.elastic.session.session import Session
from shoal_worker.elastic.session.worker_process import set_session
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.settings import WorkerSettings

from tests.simulation.scheduler import Killed, current_actor

if TYPE_CHECKING:
    from tests.simulation.coordinator import Stream
    from tests.simulation.rooms import Side
    from tests.simulation.world import World

_METRICS = WorkerMetrics()
COLLECTIVE_TIMEOUT_S = 20.0
RENDEZVOUS_TIMEOUT_S = 60.0
LONGEST_AFTER_GOODBYE_S = 6.0
DRAIN_GRACE_S = 0.03
"""Time in seconds in which a drained process finishes a few steps."""


@dataclasses.dataclass
class Diary:
    """Record that a process's script keeps of itself, step by step."""

    statuses: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    """Number of committed steps after each call to `optimizer.step()`, and the call's status."""
    returned: set[int] = dataclasses.field(default_factory=set)
    """Indices in `statuses` of the calls that returned with a checkpoint's state because the newest
    state was lost."""
    values: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Parameters and buffers by number of committed steps, if this rank has them unsharded."""
    answers: list[tuple[int, Any]] = dataclasses.field(default_factory=list)
    """Results of collective operations, each after a number of committed steps."""
    ended_with: dict[str, Any] | None = None
    """Final state of the script."""


class Process:
    """One incarnation of a worker process."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.dead = False
        self.ended = False
        self.stopped_until = 0.0
        self.exit_code: int | None = None
        self.failure: str | None = None
        self.session: Session | None = None
        self.membership: Membership | None = None
        self.sides: list[Side] = []
        self.stream: Stream | None = None
        self.points = 0
        """Number of points that the main thread has reached."""
        self.trail: list[str] = []
        """Descriptions of these points, if the world keeps trails."""
        self.diary = Diary()
        self.late = world.scheduler.now > 0
        """True if the process started after the run began."""
        self.peers_before = [
            one.name for one in world.processes if not one.gone and one.exit_code is None
        ]
        """Names of the processes that were running when this one started."""
        self.steps_before = world.steps
        """Number of steps that the others had committed when this process started."""
        self.left_at: float | None = None
        """Time of its leave message; None before."""
        self.spare = False
        """True if the process was a spare at its end."""
        self.files: list[SampleRecord] = []
        self.ended_at: float | None = None
        """Virtual time of its death or end; None before."""
        self.asked_at: float | None = None
        """Virtual time of its SIGTERM; None without one."""
        self.stopped_for_s = 0.0
        """Longest time for which SIGSTOP stopped this process, in seconds; 0: never."""
        self.steps = 0
        """Number of committed steps at its end."""
        self.rank, self.hosts = 0, list[str]()
        """Rank of this process in its last group, and the hosts of all ranks of that group."""
        self.newest_checkpoint: int | None = None
        """Step of the newest complete checkpoint when this process ended; None without one."""
        self.evicted = False
        """True once the coordinator has evicted this process, even before it has received that."""

    def record_samples(self) -> SampleRecord:
        """Opens a record of the samples that this process deals. The file is closed when the run
        ends."""
        record = SampleRecord(self.world.records, self.name)
        self.files.append(record)
        return record

    def start(self, script: Callable[[Process], None]) -> None:
        """Starts the main thread."""
        self.world.scheduler.spawn(self, "main", lambda: self._main(script), main=True)

    @property
    def gone(self) -> bool:
        """True if the process has died or ended."""
        return self.dead or self.ended

    @property
    def is_spare(self) -> bool:
        """True while the process has no part of the model."""
        return self.session is not None and self.session.is_joining

    @property
    def lacks_ranks(self) -> bool:
        """True while this process has all of the state and waits for more ranks to form a
        replica."""
        return (
            self.session is not None
            and self.session._held.has_engine
            and self.session._held.engine.lacks_ranks
        )

    @property
    def has_finished(self) -> bool:
        """True if the process has reported to its launcher that its script finished."""
        return self._member_file.exists() and self._member_file.read_text() == "finished"

    @property
    def _member_file(self) -> Path:
        return self.world.directory / f"member-{self.name}"

    # --------------------------------------------------------------------------------------- faults

    def comes_to(self, what: str) -> None:
        """Counts a point: the main thread is about to wait or passes a failpoint. Faults occur
        here."""
        self.points += 1
        self.world.holdings.look(self)
        if self.world.keeps_trails:
            self.trail.append(what)
        self.world.faults.at_point(self)

    def die(self, how: str) -> None:
        """Kills the process. A caller on one of its own threads must raise Killed afterwards."""
        if self.gone:
            return
        self.dead = True
        self.world.note(f"{self.name} dies {how}")
        self._vanish(exit_code=137)

    def drain(self) -> None:
        """Delivers SIGTERM."""
        self.world.note(f"{self.name} gets SIGTERM")
        if self.membership is not None:
            self.asked_at = self.asked_at if self.asked_at is not None else self.world.scheduler.now
            self.membership.link.drain("SIGTERM")

    def _vanish(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self.ended_at = self.world.scheduler.now
        self.newest_checkpoint = max(
            (int(one.name.split("-")[1]) for one in self.world.checkpoints.glob("step-*")),
            default=None,
        )
        lingered_s = self.world.scheduler.now - self.left_at if self.left_at is not None else 0.0
        if (
            self.ended
            and lingered_s > LONGEST_AFTER_GOODBYE_S
            and not self.world.faults.seconds_of_write(self)
            and not self.stopped_until
        ):
            self.world.violated(
                "lingers",
                f"{self.name} has ended {lingered_s:.0f} s after it sent its leave message",
            )
        for side in self.sides:
            side.end(f"{self.name} is gone")
        if self.stream is not None:
            stream = self.stream
            stream.up(lambda: self.world.coordinator.broken(stream))
        self.world.process_ended(self)

    # ----------------------------------------------------------------------------------------- life

    def _main(self, script: Callable[[Process], None]) -> None:
        with worlds.entered(None):
            try:
                self._live(script)
            except Killed:
                raise
            except SystemExit as end:
                self.exit_code = (
                    end.code if isinstance(end.code, int) else int(end.code is not None)
                )
            except Exception as error:
                self.exit_code, self.failure = 1, f"{type(error).__name__}: {error}"
                self.world.error_of(self, error)
            else:
                self.exit_code = 0
            if self.session is not None:
                self.spare, self.steps = self.session.is_joining, self.session.steps
                if self.session.group is not None:
                    generation = self.session.group.generation
                    self.rank = generation.rank
                    self.hosts = [
                        host for _, host in self.world.coordinator.members_of[generation.number]
                    ]
            self._leave()
        self.ended = True
        self.world.note(
            f"{self.name} ends with {self.exit_code}"
            + (f" ({self.failure})" if self.failure else "")
        )
        self._vanish(self.exit_code)

    def _live(self, script: Callable[[Process], None]) -> None:
        world = self.world
        settings = WorkerSettings(
            coordinator="simulated:1",
            member_id=self.name,
            collective_timeout_s=COLLECTIVE_TIMEOUT_S,
            rendezvous_timeout_s=RENDEZVOUS_TIMEOUT_S,
            connect_timeout_s=5.0,
            drain_grace_s=DRAIN_GRACE_S,
            store_url="redis://none",
            member_file=self._member_file,
            # the loop over micro-batches deals them by speed
            speed=1.0 + sum(map(ord, self.name)) % 3,
        )
        donor = world.make_donor(self)
        identity = MemberIdentity(
            job_id="job",
            member_id=self.name,
            host=world.host_of(self),
            pid=1,
            launcher_id="launcher",
            donor_address=donor.address,
        )
        self.membership = Membership(world.make_client(self), identity, settings, host="127.0.0.1")
        self.session = Session(settings, self.membership, donor, _METRICS)
        self.session.join()
        set_session(self.session)
        script(self)

    def _leave(self) -> None:
        """Leaves the job as `start._Exit` does at the end of a real process."""
        session, membership = self.session, self.membership
        set_session(None)
        if session is None or membership is None:
            return
        failed = self.failure or (f"exit status {self.exit_code}" if self.exit_code else None)
        link = membership.link
        try:
            session.close(
                failed=str(link.evicted)
                if link.evicted
                else None
                if link.stopped is not None
                else failed
            )
        except SystemExit:
            pass  # the process is about to end
        except Exception as error:
            # a real process prints the error and ends
            self.world.error_of(self, error)
            self.failure, self.exit_code = (
                self.failure or f"while leaving: {type(error).__name__}: {error}",
                self.exit_code or 1,
            )
        else:
            if link.evicted is not None:
                self.failure, self.exit_code = str(link.evicted), EVICTED
            elif session.missed is not None:
                self.failure, self.exit_code = self.failure or session.missed, self.exit_code or 1


def own_process() -> Process:
    """Returns the process to which the calling thread belongs."""
    actor = current_actor()
    assert actor is not None
    process = actor.host
    assert isinstance(process, Process)
    return process
