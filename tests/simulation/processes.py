"""Simulated worker processes: each is the product's own session, membership, link, loaders and
strategy, in threads that take turns.

A process dies at once, wherever it is: its connections close, its threads end where they would wait
next, and nothing that they still run on their way out is heard by anybody.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from shoal_common.exit_status import PUT_OUT
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
"""A few steps."""


@dataclasses.dataclass
class Diary:
    """What a process's script says of itself, step by step."""

    statuses: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    """For each call of `optimizer.step()`: committed steps after it, and its answer."""
    returned: set[int] = dataclasses.field(default_factory=set)
    """Indices in `statuses` of the calls that returned with a checkpoint's state, as the newest one
    was lost."""
    values: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """After so many committed steps: the parameters and buffers, where this rank holds them
    whole."""
    told: list[tuple[int, Any]] = dataclasses.field(default_factory=list)
    """Committed steps, and what an operation of all ranks answered then."""
    ended_with: dict[str, Any] | None = None
    """What the script had at its end."""


class Process:
    """One worker process, one incarnation."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.dead = False
        self.ended = False
        self.still_until = 0.0
        self.exit_code: int | None = None
        self.failure: str | None = None
        self.session: Session | None = None
        self.membership: Membership | None = None
        self.sides: list[Side] = []
        self.stream: Stream | None = None
        self.points = 0
        """At how many its main thread has been."""
        self.trail: list[str] = []
        """What they were."""
        self.diary = Diary()
        self.late = world.scheduler.now > 0
        """It was not there from the beginning."""
        self.peers_before = [
            one.name for one in world.processes if not one.gone and one.exit_code is None
        ]
        """Who was there when it started."""
        self.steps_before = world.steps
        """What the others had committed when it started."""
        self.left_at: float | None = None
        """Time of its leave message; None before."""
        self.spare = False
        """At its end it had no part in the model."""
        self.files: list[SampleRecord] = []
        self.ended_at: float | None = None
        """When it died or ended."""
        self.asked_at: float | None = None
        """When it got SIGTERM."""
        self.stood_still_s = 0.0
        """Longest time for which SIGSTOP stopped this process, in seconds; 0: never."""
        self.steps = 0
        """What it had committed at its end."""
        self.rank, self.hosts = 0, list[str]()
        """This process's rank in its last group, and the hosts of all ranks of that group."""
        self.newest_checkpoint: int | None = None
        """The steps of the newest complete checkpoint at its end."""
        self.put_out = False
        """The coordinator has told it so, or is about to."""

    def record_samples(self) -> SampleRecord:
        """A record of the samples that this process deals, in a file that is closed when the run
        ends."""
        record = SampleRecord(self.world.records, self.name)
        self.files.append(record)
        return record

    def start(self, script: Callable[[Process], None]) -> None:
        """Starts its main thread."""
        self.world.scheduler.spawn(self, "main", lambda: self._main(script), main=True)

    @property
    def gone(self) -> bool:
        """It has died or ended."""
        return self.dead or self.ended

    @property
    def is_spare(self) -> bool:
        """It has no part in the model yet, or any more."""
        return self.session is not None and self.session.is_joining

    @property
    def lacks_ranks(self) -> bool:
        """This process has all of the state, and waits for more ranks, with which it could hold a
        replica."""
        return (
            self.session is not None
            and self.session._held.has_engine
            and self.session._held.engine.lacks_ranks
        )

    @property
    def has_finished(self) -> bool:
        """It told its launcher that it came to the end of its script."""
        return self._member_file.exists() and self._member_file.read_text() == "finished"

    @property
    def _member_file(self) -> Path:
        return self.world.directory / f"member-{self.name}"

    # --------------------------------------------------------------------------------------- faults

    def comes_to(self, what: str) -> None:
        """Its main thread is about to wait, or passes a failpoint: here it may die, hang, or be
        told something."""
        self.points += 1
        self.world.holdings.look(self)
        if self.world.keeps_trails:
            self.trail.append(what)
        self.world.faults.at_point(self)

    def die(self, how: str) -> None:
        """Kills it. Who calls this in one of its own threads raises Killed then."""
        if self.gone:
            return
        self.dead = True
        self.world.note(f"{self.name} dies {how}")
        self._vanish(exit_code=137)

    def drain(self) -> None:
        """SIGTERM."""
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
            and not self.still_until
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
        """As a process ends: see `start._Exit`."""
        session, membership = self.session, self.membership
        set_session(None)
        if session is None or membership is None:
            return
        failed = self.failure or (f"exit status {self.exit_code}" if self.exit_code else None)
        link = membership.link
        try:
            session.close(
                failed=str(link.put_out)
                if link.put_out
                else None
                if link.stopped is not None
                else failed
            )
        except SystemExit:
            pass  # it is about to end
        except Exception as error:
            # at the end of a real process it is printed, and the process ends
            self.world.error_of(self, error)
            self.failure, self.exit_code = (
                self.failure or f"while leaving: {type(error).__name__}: {error}",
                self.exit_code or 1,
            )
        else:
            if link.put_out is not None:
                self.failure, self.exit_code = str(link.put_out), PUT_OUT
            elif session.missed is not None:
                self.failure, self.exit_code = self.failure or session.missed, self.exit_code or 1


def own_process() -> Process:
    """The one that the calling thread belongs to."""
    actor = current_actor()
    assert actor is not None
    process = actor.host
    assert isinstance(process, Process)
    return process
