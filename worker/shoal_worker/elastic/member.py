"""A rank's place among the others, as the session asks after it.

A protocol, because there are two kinds of place: a member of a job has a coordinator that deals
ranks anew when members come and go (`membership.py`); a rank of a launch has the same place from
beginning to end (`fixed.py`). The session runs the same code over both.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, Protocol

from shoal_common.errors import ShoalError

from shoal_worker.elastic.generation import Generation
from shoal_worker.elastic.group import Group
from shoal_worker.elastic.progress import ProgressMeter
from shoal_worker.elastic.strategy_interface import TrainingEngine


class LeaveReason(enum.Enum):
    """Why a member gives up its place."""

    DRAINED = enum.auto()
    """It was asked to, or got SIGTERM; it left at a border."""
    FINISHED = enum.auto()
    """Its script came to its end: the run is over for all."""
    FAILED = enum.auto()
    """Its script raised."""


@dataclass(frozen=True, kw_only=True)
class LastState:
    """Digests of the common state of the ranks, taken as the script left its loop over a loader."""

    generation: int
    """The one that it worked in: it says how the state was cut."""
    step: int
    """Committed steps."""
    agreed: int
    """Steps after which all were last known to hold the same; 0: none."""
    digests: Mapping[str, int]
    """By the names of groups of tensors."""


class Notices(Protocol):
    """What this rank is told, and what it tells."""

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
        """Why this rank must not train on; None: it may."""
        ...

    @property
    def finished_steps(self) -> int:
        """Committed steps of a peer whose script has come to its end; 0: none has, as far as this
        rank was told."""
        ...

    @property
    def draining(self) -> str | None:
        """Why this member is to leave at the next border; None: it is not."""
        ...

    @property
    def excluded(self) -> bool:
        """It is to leave because the coordinator writes a generation without it."""
        ...

    @property
    def stopped(self) -> str | None:
        """Why the job is to stop; None: it goes on."""
        ...

    def ready(self) -> None:
        """Asks for a rank."""
        ...

    def stands_by(self) -> None:
        """This rank has no part in the model, until it enters another generation: the run may end
        without it."""
        ...


class Member(Protocol):
    """A rank's place."""

    @property
    def link(self) -> Notices: ...

    def observe(self, progress: ProgressMeter) -> None:
        """`progress` is this rank's: told to whoever asks after it. Before `join`."""
        ...

    @property
    def group(self) -> Group | None:
        """The group formed last; it may be broken. None before the first and after
        `leave_group`."""
        ...

    @property
    def only_backend(self) -> str | None:
        """The one backend whose groups this place allows; None: any."""
        ...

    def join(self) -> bool:
        """Takes the place. Returns whether others have trained already: then this rank replays its
        script up to the first live batch."""
        ...

    def serve(self, engine: TrainingEngine) -> None:
        """`engine` is what trains: its backend makes the groups. Before the first `form`.

        Raises:
            ConfigurationError: it cannot be trained in this place.
        """
        ...

    def await_generation(self, timeout: timedelta | None = None) -> Generation:
        """Waits for a generation that this rank has not been in, without connecting it. `timeout`:
        None: as long as for forming one."""
        ...

    def form(self) -> Group:
        """Connects the next generation."""
        ...

    def failed(self, error: BaseException) -> None:
        """A collective failed here. Raises if there will be no other generation."""
        ...

    def give_up_place(self, why: str) -> NoReturn:
        """Leaves at once: this rank cannot come to where its peers are, and its process is to end
        and to be replaced.

        Raises:
            PreconditionError: MEMBER_BEHIND, always.
        """
        ...

    def check_current(self, generation: int) -> None:
        """Raises StaleGenerationError if this rank, which acts for `generation`, was put out since.
        On any thread."""
        ...

    def has_left(self, member_id: str) -> bool:
        """Whether a member of a generation has left, or was put out. On any thread."""
        ...

    def all_have(self, generation: Generation, apart_from: Collection[int], step: int) -> bool:
        """Whether all of `generation`, but for these ranks of it, that belong to the run still are
        known to have committed `step`, as this rank has: it says so at once."""
        ...

    def last_departures(self) -> Sequence[str]:
        """The members that left or were lost last, each with the reason, the latest first; empty:
        none did, or nobody can tell now."""
        ...

    def leave_group(self, reason: str) -> None:
        """Lets go of the group."""
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
        """Gives up the place. `held`: what is to be compared with the other ranks'. Returns how it
        differs from theirs; empty if it does not, or if none has reported the same step yet."""
        ...
