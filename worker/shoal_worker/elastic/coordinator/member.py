"""Interface of a rank's membership, as used by the session.

A protocol, because there are two implementations: a member of a job has a coordinator that
reassigns ranks when members come and go (`membership.py`); a rank of a launch keeps its place from
beginning to end (`fixed.py`). The session runs the same code over both.
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
    """Reason for which a member leaves."""

    DRAINED = enum.auto()
    """Asked to leave, or got SIGTERM; left at a step boundary."""
    FINISHED = enum.auto()
    """Script finished: the run is over for all."""
    FAILED = enum.auto()
    """Its script raised."""


class Notices(Protocol):
    """Messages to and from this rank."""

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
        """Reason why this rank must not train on; None if it may."""
        ...

    @property
    def finished_steps(self) -> int:
        """Committed steps of a peer whose script finished; 0 if none has, as far as this rank
        knows."""
        ...

    @property
    def draining(self) -> str | None:
        """Reason why this member must leave at the next step boundary; None if it need not."""
        ...

    @property
    def excluded(self) -> bool:
        """True if it must leave because the coordinator writes a generation without it."""
        ...

    @property
    def stopped(self) -> str | None:
        """Reason why the job must stop; None while it continues."""
        ...

    def ready(self) -> None:
        """Asks for a rank."""
        ...

    def stands_by(self) -> None:
        """Reports that this rank has no part in the model until it enters another generation: the
        run may end without it."""
        ...


class Member(Protocol):
    """Membership of a rank."""

    @property
    def link(self) -> Notices: ...

    def observe(self, progress: ProgressMeter) -> None:
        """Registers this rank's `progress` for reports. Call before `join`."""
        ...

    @property
    def group(self) -> Group | None:
        """Group formed last, possibly broken. None before the first and after `leave_group`."""
        ...

    @property
    def only_backend(self) -> str | None:
        """The only backend allowed here; None: any."""
        ...

    def join(self) -> bool:
        """Takes the place. Returns whether others have trained already: then this rank replays its
        script up to the first live batch."""
        ...

    def serve(self, engine: TrainingEngine) -> None:
        """Sets the training engine, whose backend creates the groups. Call before the first `form`.

        Raises:
            ConfigurationError: it cannot be trained here.
        """
        ...

    def await_generation(self, timeout: timedelta | None = None) -> Generation:
        """Waits for a generation that this rank has not been in, without connecting it. `timeout`:
        None: the same as for forming one."""
        ...

    def form(self) -> Group:
        """Connects the next generation."""
        ...

    def failed(self, error: BaseException) -> None:
        """Handles the failure of a collective. Raises if there will be no other generation."""
        ...

    def give_up_place(self, why: str) -> NoReturn:
        """Leaves at once because this rank cannot catch up with its peers; its process must end and
        be replaced.

        Raises:
            PreconditionError: MEMBER_BEHIND, always.
        """
        ...

    def check_current(self, generation: int) -> None:
        """Raises StaleGenerationError if this rank, which acts for `generation`, was evicted since.
        Thread-safe."""
        ...

    def has_left(self, member_id: str) -> bool:
        """Returns whether a member of a generation has left or was evicted. Thread-safe."""
        ...

    def all_have(self, generation: Generation, apart_from: Collection[int], step: int) -> bool:
        """Returns whether all members of `generation` that still belong to the run, except these
        ranks, are known to have committed `step`, as this rank has, which it reports at once."""
        ...

    def last_departures(self) -> Sequence[str]:
        """Returns the members that left or were lost last, each with the reason, latest first;
        empty if none did or it is unknown."""
        ...

    def leave_group(self, reason: str) -> None:
        """Releases the group."""
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
        """Leaves. `held`: digests for the comparison with the other ranks. Returns the difference;
        empty if there is none, or if none has reported the same step yet."""
        ...
