"""Interface of a rank's membership, as used by the session.

There are two implementations. In a job, the coordinator reassigns ranks when members join and leave
(`membership.py`). In a launch, a rank never changes (`fixed.py`). The session runs the same code
with either.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import NoReturn, Protocol

from shoal_common.errors import ShoalError

from shoal_worker.elastic.contract.generation import Generation
from shoal_worker.elastic.contract.last_state import LastState
from shoal_worker.elastic.coordinator.progress import ProgressMeter
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.state.strategy_interface import TrainingEngine


class LeaveReason(enum.Enum):
    """Reason why a member leaves."""

    DRAINED = enum.auto()
    """The member was asked to leave, or received SIGTERM, and left at a step boundary."""
    FINISHED = enum.auto()
    """The member's script has finished, which ends the run for all members."""
    FAILED = enum.auto()
    """The member's script raised an exception."""


class Notices(Protocol):
    """Notices about this rank's membership, and methods with which the rank reports to the
    coordinator."""

    @property
    def newest(self) -> int:
        """Number of the newest generation known; 0 before the first."""
        ...

    @property
    def newest_generation(self) -> Generation | None:
        """The newest generation known."""
        ...

    @property
    def refused(self) -> ShoalError | None:
        """Error that explains why this rank must stop training; None if it may continue."""
        ...

    @property
    def finished_steps(self) -> int | None:
        """Number of committed steps of a peer whose script has finished; None if no such peer is
        known."""
        ...

    @property
    def draining(self) -> str | None:
        """Reason why this member must leave at the next step boundary; None if it may stay."""
        ...

    @property
    def excluded(self) -> bool:
        """True if the coordinator forms a generation without this member. In that case, this member
        must leave."""
        ...

    @property
    def stopped(self) -> str | None:
        """Reason why the job must stop; None while it continues."""
        ...

    def ready(self) -> None:
        """Requests a rank."""
        ...

    def become_spare(self) -> None:
        """Reports that this rank has no part of the model until it enters another generation. The
        run may end without this rank."""
        ...


class Member(Protocol):
    """Membership of a rank in a job or a launch."""

    @property
    def link(self) -> Notices: ...

    def observe(self, progress: ProgressMeter) -> None:
        """Registers `progress` as the source of this rank's reports. Must be called before
        `join`."""
        ...

    @property
    def group(self) -> Group | None:
        """The last group that was formed, which may have failed; None before the first and after
        `leave_group`."""
        ...

    @property
    def only_backend(self) -> str | None:
        """The only backend that this membership allows; None: any backend."""
        ...

    def join(self) -> bool:
        """Joins the job or launch. Returns True if other ranks have already trained. In that case,
        this rank must replay its script until it reaches its first training batch."""
        ...

    def serve(self, engine: TrainingEngine) -> None:
        """Sets the training engine, which provides the backend for connecting groups. Must be
        called before the first `form`."""
        ...

    def await_generation(self, timeout: timedelta | None = None) -> Generation:
        """Waits for a generation that this rank has not entered yet, and returns it without
        connecting to its ranks. `timeout`: maximum time to wait; None: the timeout for forming a
        generation."""
        ...

    def form(self) -> Group:
        """Waits for the next generation, connects its ranks, and returns their group."""
        ...

    def failed(self, error: BaseException) -> None:
        """Reports that a collective has failed. Raises an error if no further generation will
        follow."""
        ...

    def give_up_place(self, why: str) -> NoReturn:
        """Leaves immediately, because this rank cannot catch up with its peers. Its process must
        exit and be replaced.

        Raises:
            PreconditionError (MEMBER_BEHIND): always.
        """
        ...

    def check_current(self, generation: int) -> None:
        """Checks that this rank still belongs to the job. Raises StaleGenerationError if it has
        been evicted since `generation`. Thread-safe."""
        ...

    def has_left(self, member_id: str) -> bool:
        """Returns whether a member of a generation has left or has been evicted. Thread-safe."""
        ...

    def all_have(self, generation: Generation, apart_from: Collection[int], step: int) -> bool:
        """Returns whether all members of `generation` that still belong to the run are known to
        have committed `step`, ignoring the ranks in `apart_from`. This rank itself must have
        committed the step; the call reports that to the coordinator immediately."""
        ...

    def last_departures(self) -> Sequence[str]:
        """Returns the members that have left or failed most recently, with the reasons, latest
        first. Empty if there are none, or if they are unknown."""
        ...

    def leave_group(self, reason: str) -> None:
        """Releases the group. `reason`: error message for peers that are waiting for this rank."""
        ...

    def leave(
        self,
        reason: LeaveReason,
        detail: str = "",
        *,
        alone: bool = False,
        steps: int = 0,
        held: LastState | None = None,
    ) -> str:
        """Leaves the job or launch. Returns a description of how this rank's state differs from the
        state of another rank; empty if it does not differ, or if no other rank has reported the
        same step yet.

        Args:
            alone: True if the other members continue.
            steps: number of steps that this process has committed.
            held: digests of this rank's state, for comparison with other ranks.
        """
        ...
