"""Contract between the elastic session and the loaders. The contract with engines is in
`strategy_interface.py`.

The session owns the generation and decides when a step begins, commits or is lost. Loaders only
distribute samples and keep a cursor. The protocols below define their interaction. Everything runs
on the thread of the user's training loop.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shoal_common.errors import PreconditionError


class StepStatus(enum.Enum):
    """Outcome of a step, the same on every rank that survives it. True when committed, so that side
    effects can follow `if optimizer.step():`."""

    COMMITTED = "committed"
    """Every rank's part is included, and every survivor has applied the step or is about to. Only a
    return to an older checkpoint undoes it."""
    LOST = "lost"
    """A fault aborted the step: no rank applied it, and the loader repeats the same samples,
    redistributed."""

    PENDING = "pending"
    """One of several models was updated. The outcome is known after the update of the last model,
    or with the next batch."""

    def __bool__(self) -> bool:
        return self is StepStatus.COMMITTED


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Position of this process in the generation of a step."""

    generation: int
    """Number of the agreed generation; 0 in a world of one without a coordinator."""
    rank: int
    """This replica's data-parallel rank, which determines its samples. Equals the global rank
    unless a model is split over ranks."""
    world_size: int
    """Number of data-parallel replicas."""
    leads_replica: bool = True
    """True if this is the rank that counts and records the samples among the ranks of a replica,
    which all get the same ones."""
    least_samples: int = 1
    """Minimum number of samples that a rank gets in a short step, unless it gets none: batch
    normalization needs two."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """This rank's part of one step's global batch, passed by the loader before it hands out the
    first batch of the step."""

    weight: float
    """Weight of this rank's samples (their number, unless a `weight_fn` is given); 0 for a stand-in
    batch. With a `weight_fn` and micro-batches it is known only at the end: NaN here, and
    `begin_micro_batch` passes each one's."""
    total_weight: float | None
    """Weight of the entire global batch if it is known without asking the other ranks, otherwise
    None."""
    micro_batches: int | None
    """Number of micro-batches of this rank in this step (may be 0); None: one plain batch per
    rank."""
    most_micro_batches: int = 0
    """Maximum of this number over all ranks. Strategies that communicate in every pass take part in
    that many."""


WeighRows = Callable[[Sequence[int]], list[float]]
"""Returns the weights of parts of a batch with these numbers of rows. Raises ConfigurationError."""


class LoaderSession(Protocol):
    """The session from a loader's perspective."""

    def begin_step(self, source: StepSource) -> Placement:
        """Starts the next step at a step boundary, where joins, drains and failures are settled.

        Blocks while the generation re-forms. In a joiner, the first call reports readiness, waits
        for a rank and receives the peers' state, so the caller must read its own cursor only after
        this returns. Raises `StopTraining` if the job is stopped or this member drained.

        A step only exists after `assign`: if this is called again before that, it is the same
        boundary once more. Loaders rely on this when an epoch turns out to be over (the cursor
        received by a joiner is in a later one), and while they wait for leases. A joiner stays
        joining until its first `assign`.
        """
        ...

    def enter_epochs(self, source: StepSource) -> int:
        """Enters `epochs()`. Returns the first epoch to hand out, once the run's position is known:
        a step boundary for a joiner, as in `begin_step`. After a resume, or in a joiner, other
        loaders restart the count of their iterations from this loop's position. Raises
        `StopTraining`."""
        ...

    def epoch_opens(self, source: StepSource, epoch: int, *, epochs: int) -> None:
        """Announces that `epochs()` is about to hand out `epoch`, in a loop that ends with
        `epochs`."""
        ...

    def is_elsewhere(self, source: StepSource, epoch: int) -> bool:
        """Returns whether a joiner's script must skip this iteration because its peers are in one
        of another loader or epoch. Known once it has received the state, at its first boundary."""
        ...

    def assign(self, share: Share) -> None:
        """Passes the share of this rank in the step that has begun."""
        ...

    def sum_numbers(self, values: Sequence[float], *, or_own: bool = False) -> list[float] | None:
        """Sums numbers elementwise over all ranks, in float64. Called on all ranks in a step that
        began, before `assign`. Returns None if a rank failed and the step is aborted; its batches
        are handed out nevertheless, so that all scripts see it lost.

        Args:
            values: equally many on all ranks.
            or_own: if ranks take independent steps, return `values`.

        Raises:
            ConfigurationError: under this strategy ranks take independent steps.
        """
        ...

    def begin_micro_batch(
        self, *, index: int, weight: float, key: Sequence[int], weigh: WeighRows | None
    ) -> None:
        """Announces micro-batch `index` (0-based over the entire global batch) before it is handed
        out. `key` = (seed, epoch, step, micro-batch): its random numbers. `weigh`: for strategies
        that split it further; None: its samples weigh the same. Plain batches call it once, with
        index = rank."""
        ...

    def end_micro_batch(self) -> None:
        """Announces that the user's loop has finished the micro-batch, including its backward
        pass."""
        ...

    def finish_batches(self) -> None:
        """Ends the micro-batches of a step, once the inner loop has finished, even if this rank had
        none: the gradients of all ranks are reduced here, so that they are complete between the
        inner loop and `optimizer.step()`."""
        ...

    def batch_passed(self, source: StepSource) -> None:
        """Announces that the loop requests the next batch after a step. With several models, this
        ends a step in which some were not updated."""
        ...

    def loop_left(self, source: StepSource) -> None:
        """Announces that an iteration is left, or that another one begins while it waits. If a
        batch was handed out and its step not finished, `optimizer.step()` may still finish it;
        otherwise the batch was only looked at, and the next `begin_step` repeats its samples."""
        ...

    def loop_ended(self) -> None:
        """Announces that a `for` loop over a loader has ended, before the script does anything
        else."""
        ...

    def passed_over(self, source: StepSource) -> None:
        """Announces that an iteration of a training loader has ended without steps, because the run
        has already taken all of them or will take none."""
        ...

    def end_epoch(self, source: StepSource) -> None:
        """Ends an epoch of a training loader without a further step. Returns when every rank has
        confirmed the last step, so that no rank evaluates, saves or exits while another still has
        to repeat it."""
        ...

    def register_source(self, source: StepSource) -> None:
        """Registers a training loader.

        Its constructor calls this once. The loader calls it again before its first `begin_step`
        under another session. The loader receives the cursor that a checkpoint or a peer stored
        under its name, if any. The session holds it weakly. Raises ConfigurationError if another
        live loader has its name.
        """
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
        """Leases batches first come, first served (async_sgd), from the coordinator or locally in a
        world of one. `want` 0: the loop is left, and all leases are returned except `at_hand`,
        which `optimizer.step()` may still finish (see `Leases.took_back_at_hand`)."""
        ...

    def wait_for_others(self, what: str | None) -> None:
        """Reports that this rank waits for the others' part of `what`, until it is called with
        None: a rank that hangs meanwhile is evicted."""
        ...


@dataclass(frozen=True, kw_only=True)
class Leases:
    """Answer to `lease_batches`."""

    batches: tuple[int, ...]
    epoch_done: bool
    retry_after_s: float
    took_back_at_hand: bool = False
    """True if the loop was left within a round of inner steps, so that the batch at hand is
    returned too."""


class StepSource(Protocol):
    """A loader from the session's perspective. Its state is part of the committed state."""

    @property
    def name(self) -> str:
        """Name that is stable across restarts and unique in the process."""
        ...

    @property
    def dealing(self) -> str:
        """Determines its batches, besides the cursor: the same on all ranks."""
        ...

    @property
    def epoch(self) -> int:
        """Epoch of the cursor."""
        ...

    @property
    def next_epoch(self) -> int:
        """Epoch of the next iteration outside of `epochs()`: earlier ones are over."""
        ...

    @property
    def within(self) -> int | None:
        """Epoch handed out by its `epochs()`; None outside of that loop."""
        ...

    @property
    def gives_up(self) -> int | None:
        """Epoch whose rest is abandoned because the loop over its batches was left early; None if
        there is none."""
        ...

    @property
    def repeats(self) -> int | None:
        """Epoch that a resumed run repeats from its beginning, because the cursor does not contain
        the finished batches; None if there is none."""
        ...

    @property
    def next_iteration(self) -> int:
        """Epoch of the next iteration outside of `epochs()`, by the iterations that this script has
        passed."""
        ...

    @property
    def step(self) -> int:
        """Number of committed steps of that epoch."""
        ...

    @property
    def ends_epoch(self) -> bool:
        """True if the last step handed out is the last of its epoch, or of the loop over
        epochs."""
        ...

    @property
    def under_way(self) -> bool:
        """True if the script is inside an iteration of it."""
        ...

    @property
    def is_over(self) -> bool:
        """True if the cursor is after the last step of the loop that requested the boundary, so
        that no step follows."""
        ...

    @property
    def step_samples(self) -> int:
        """Samples of the last step handed out, over all ranks; for a leased batch, those of this
        rank."""
        ...

    def steps_until(self, epoch: int) -> int | None:
        """Returns the number of steps from the cursor to the start of `epoch`, or to `max_steps` of
        its `epochs()`, if no loop is left early; over all ranks if they are leased. None if
        unknown, as for a stream without `max_steps`."""
        ...

    def count_from(self, epoch: int | None) -> None:
        """Sets `next_epoch` to `epoch`, or with None to its value in the state loaded last."""
        ...

    @property
    def leased(self) -> bool:
        """True if its batches are leased first come, first served, instead of distributed by
        rank."""
        ...

    def committed(
        self, placement: Placement, *, known: bool = False, pushed: Sequence[int] | None = None
    ) -> int:
        """Commits the last step handed out in `placement`'s generation: advances the cursor and
        writes the record. Returns the number of counted samples of this rank. `known`: it is a
        leased batch that another member had already pushed. `pushed`: see `Step.pushed`."""
        ...

    def leaving(self) -> None:
        """Acknowledges finished batches because this process leaves the job at once."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the JSON-able cursor after the last commit."""
        ...

    def cursor_reader(self) -> Callable[[], dict[str, Any]]:
        """Returns a call that returns `state_dict()` and does not hold the loader."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adopts a cursor of a checkpoint or a peer. Drops prefetched batches."""
        ...


class StopTraining(Exception):
    """Raised inside a loader to end its iteration: the job is stopped or finished, or this member
    was drained."""


class Drained(StopTraining):
    """Only this member leaves: it was asked to drain, or got SIGTERM. Ends the process with status
    0."""


class LeftOver(StopTraining):
    """Every rank that held the model is gone, and this process is a spare: it ends and is
    restarted."""


class StateLostError(PreconditionError):
    """The remaining ranks hold only part of the state and can continue only from a checkpoint.
    Raised on all of them."""
