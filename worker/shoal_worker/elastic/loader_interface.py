"""What the elastic session and the loaders promise each other; what it has with engines is in
`strategy_interface.py`.

The session owns the generation and decides when a step begins, commits or is lost. Loaders only
deal samples and keep a cursor. They meet in the protocols below. All of it runs on the thread that
runs the user's training loop.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shoal_common.errors import PreconditionError


class StepStatus(enum.Enum):
    """What became of a step: the same on every rank that survives it. True when committed, so that
    side effects can stand behind `if optimizer.step():`."""

    COMMITTED = "committed"
    """Every rank's part is in, and every survivor has applied it or is about to."""
    LOST = "lost"
    """A fault made the step void: no rank applied it, and the loader hands out the same samples
    again, dealt anew."""

    PENDING = "pending"
    """One of several models is updated; whether the step counts is known with the last of their
    optimizers, or with the next batch."""

    def __bool__(self) -> bool:
        return self is StepStatus.COMMITTED


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where this process stands in the generation that a step belongs to."""

    generation: int
    """Number of the agreed generation; 0 in a world of one without a coordinator."""
    rank: int
    """This replica's data-parallel rank: what samples are dealt by. Equals the global rank unless a
    model is split over ranks."""
    world_size: int
    """Number of data-parallel replicas."""
    leads_replica: bool = True
    """Among the ranks of a replica, which all get the same samples, this is the one that counts and
    records them."""
    least_samples: int = 1
    """Samples that a rank gets of a short step, unless it gets none: batch normalization needs
    two."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """This rank's part of one step's global batch, told by the loader before it hands out the first
    batch of the step."""

    weight: float
    """Weight of this rank's samples (their number, unless a `weight_fn` says otherwise); 0 for a
    stand-in batch. With a `weight_fn` and micro-batches it is only known at the end: NaN here, and
    `begin_micro_batch` carries each one's."""
    total_weight: float | None
    """Weight of the whole global batch when it is known without asking the other ranks, else
    None."""
    micro_batches: int | None
    """How many micro-batches this rank gets in this step (may be 0); None: the step is one plain
    batch per rank."""
    most_micro_batches: int = 0
    """How many the rank gets that gets the most. Strategies that communicate in every pass take
    part in as many."""


WeighRows = Callable[[Sequence[int]], list[float]]
"""What parts of a batch weigh, of so many rows each. Raises ConfigurationError."""


class LoaderSession(Protocol):
    """The session, as a loader sees it."""

    def begin_step(self, source: StepSource) -> Placement:
        """Starts the next step: the border at which joins, drains and failures are settled.

        Blocks while the generation re-forms. In a joiner, the first call says ready, waits for a
        rank and receives the peers' state, so the caller must read its own cursor only after this
        returns. Raises `StopTraining` when the job is stopped or this member drained.

        What begins here is no step until `assign`: called again before that, it is the same border
        once more. Loaders rely on it where an epoch turns out to be over (the cursor that a joiner
        received is in a later one), and while they wait for leases. A joiner stays joining until
        its first `assign`.
        """
        ...

    def enter_epochs(self, source: StepSource) -> int:
        """Called at the head of `epochs()`. Returns the first epoch to give out, once it is known
        where the run stands: a border for a joiner, as in `begin_step`. After a resume, or in a
        joiner, other loaders count their iterations anew from where this loop stood. Raises
        `StopTraining`."""
        ...

    def epoch_opens(self, source: StepSource, epoch: int, *, epochs: int) -> None:
        """Called when `epochs()` is about to give out `epoch`, of the `epochs` that its loop ends
        with."""
        ...

    def is_elsewhere(self, source: StepSource, epoch: int) -> bool:
        """Whether a joiner's script has to pass over this iteration: its peers stand in one of
        another loader, or of another epoch. Known once it was fed, at its first border."""
        ...

    def assign(self, share: Share) -> None:
        """Tells the share of this rank in the step that began."""
        ...

    def sum_numbers(self, values: Sequence[float], *, or_own: bool = False) -> list[float] | None:
        """Sums over all ranks what each gives, number by number, in float64. Called on all ranks
        alike in a step that began, before `assign`. None: a rank failed, and the step is void; its
        batches are handed out all the same, so that all scripts see it lost.

        Args:
            values: equally many on all ranks.
            or_own: where steps are each rank's own, give back `values`.

        Raises:
            ConfigurationError: under this strategy steps are each rank's own.
        """
        ...

    def begin_micro_batch(
        self, *, index: int, weight: float, key: Sequence[int], weigh: WeighRows | None
    ) -> None:
        """Called before micro-batch `index` (0-based over the whole global batch) is handed out.
        `key` = (seed, epoch, step, micro-batch): its random numbers. `weigh`: for strategies that
        cut it further; None: its samples weigh alike. Plain batches call it once, with index =
        rank."""
        ...

    def end_micro_batch(self) -> None:
        """Called when the user's loop asks for what follows the micro-batch handed out: its
        backward is done."""
        ...

    def finish_batches(self) -> None:
        """Called once per step with micro-batches, when the inner loop has come to its end, also if
        this rank had none: the gradients of all ranks are reduced here, so that they are whole
        between the inner loop and `optimizer.step()`."""
        ...

    def batch_passed(self, source: StepSource) -> None:
        """Called when the loop asks for what follows a step. With several models, of which some
        were not updated in it, that ends it."""
        ...

    def loop_left(self, source: StepSource) -> None:
        """Called when an iteration is left, or another one begins while it waits. If a batch of it
        was handed out and its step was not finished, it may still be, by `optimizer.step()`; or it
        was only looked at, and the next `begin_step` deals its samples again."""
        ...

    def loop_ended(self) -> None:
        """Called when a `for` loop over a loader has ended, before the script does anything
        else."""
        ...

    def passed_over(self, source: StepSource) -> None:
        """Called at the end of an iteration of a training loader in which the run has taken all its
        steps before, or will take none: the script goes on to what follows it."""
        ...

    def end_epoch(self, source: StepSource) -> None:
        """Called when an epoch of a training loader has no further step. Returns when every rank
        has confirmed the last step, so that no rank goes on to evaluate, save or exit while another
        still has to redo it."""
        ...

    def register_source(self, source: StepSource) -> None:
        """Called once by a training loader's constructor, and before its first `begin_step` with
        another session than it was made under. Gives it the cursor of a checkpoint or a peer, if
        one waits under its name. Holds the source weakly. Raises ConfigurationError when another
        live loader has its name."""
        ...

    def lease_batches(
        self,
        *,
        loader: str,
        epoch: int,
        batches_in_epoch: int,
        finished: Sequence[int],
        want: int,
        at_hand: int | None = None,
    ) -> Leases:
        """Leases batches first come first served (async_sgd), from the coordinator or local in a
        world of one. `want` 0: the loop is left, and all that is leased goes back but `at_hand`,
        which `optimizer.step()` may still finish (see `Leases.took_back_at_hand`)."""
        ...

    def wait_for_others(self, what: str | None) -> None:
        """Tells that this rank waits for the others' part of `what`, until it is called with None:
        who hangs meanwhile is put out."""
        ...


@dataclass(frozen=True, kw_only=True)
class Leases:
    """Answer to `lease_batches`."""

    batches: tuple[int, ...]
    epoch_done: bool
    retry_after_s: float
    took_back_at_hand: bool = False
    """The loop was left within a round of inner steps: what was at hand goes back, too."""


class StepSource(Protocol):
    """A loader, as the session sees it. Its state is a part of the committed state."""

    @property
    def name(self) -> str:
        """Stable over restarts, unique in the process."""
        ...

    @property
    def dealing(self) -> str:
        """What its batches follow from, beside the cursor: the same on all ranks."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch that the cursor is in."""
        ...

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iteration that stands in no `epochs()`: those of earlier ones are
        over."""
        ...

    @property
    def within(self) -> int | None:
        """The epoch that its `epochs()` has given out; None outside of that loop."""
        ...

    @property
    def gives_up(self) -> int | None:
        """The epoch whose rest is given up, since the loop over its batches was left early; None:
        there is none."""
        ...

    @property
    def next_iteration(self) -> int:
        """The epoch of the next iteration in no `epochs()`, by the iterations that this script has
        passed."""
        ...

    @property
    def step(self) -> int:
        """Steps of that epoch that are committed."""
        ...

    @property
    def ends_epoch(self) -> bool:
        """The step handed out last is the last of its epoch."""
        ...

    @property
    def under_way(self) -> bool:
        """The script is inside an iteration of it."""
        ...

    @property
    def is_over(self) -> bool:
        """The cursor is behind the last step of the loop that has asked for the border: none
        follows it."""
        ...

    @property
    def step_samples(self) -> int:
        """Samples of the step handed out last, over all ranks; of a leased batch those that this
        rank has got."""
        ...

    def steps_until(self, epoch: int) -> int | None:
        """Steps from the cursor to the head of `epoch`, if no loop is left early; over all ranks
        where they are leased. None: nobody knows, of a stream."""
        ...

    def count_from(self, epoch: int | None) -> None:
        """Sets `next_epoch` to `epoch`, or with None to what it was in the state loaded last."""
        ...

    @property
    def leased(self) -> bool:
        """Its batches are leased first come first served, instead of dealt by rank."""
        ...

    def committed(
        self, placement: Placement, *, known: bool = False, pushed: Sequence[int] | None = None
    ) -> int:
        """The step handed out last is committed in `placement`'s generation: advance the cursor,
        write the record. Returns the number of samples of this rank that counted. `known`: it is a
        leased batch that another member had pushed already. `pushed`: see `Step.pushed`."""
        ...

    def leaving(self) -> None:
        """This process leaves the job at once: acknowledges what is finished and not said yet."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the last commit; JSON-able."""
        ...

    def cursor_reader(self) -> Callable[[], dict[str, Any]]:
        """A call that returns `state_dict()`, and does not hold the loader."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a cursor (of a checkpoint or of a peer). Drops what was prefetched."""
        ...


class StopTraining(Exception):
    """Raised inside a loader to end its iteration: the job is stopped, finished, or this member was
    drained."""


class Drained(StopTraining):
    """This member alone leaves: it was asked to drain, or got SIGTERM. Ends the process with status
    0."""


class LeftOver(StopTraining):
    """Every rank that held the model is gone, and this one is a spare: the process ends, to be
    started again."""


class StateLostError(PreconditionError):
    """The ranks that are left hold but a part of the state: they can only go on from a checkpoint.
    Raised on all of them alike."""
