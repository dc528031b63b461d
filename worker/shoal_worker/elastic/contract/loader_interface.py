"""Contract between the elastic session and the loaders. The contract with engines is in
`strategy_interface.py`.

The session owns the generation and decides when a step begins, commits or is lost. Loaders only
distribute samples and keep a cursor. The protocols below define how both interact. All calls run on
the thread of the user's training loop.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shoal_common.errors import PreconditionError


class StepStatus(enum.Enum):
    """Outcome of a step, the same on every rank that survives the step. COMMITTED is true and the
    other members are false, so side effects can follow `if optimizer.step():`."""

    COMMITTED = "committed"
    """The step includes every rank's part, and every survivor has applied it or is about to. Only a
    return to an older checkpoint undoes it."""
    LOST = "lost"
    """A fault aborted the step: no rank applied it, and the loader repeats the same samples,
    redistributed."""

    PENDING = "pending"
    """One of several models was updated. The outcome is known after the last model's update, or
    when the next batch is requested."""

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
    """True if this rank counts and records the samples of its replica. All ranks of a replica
    receive the same samples."""
    least_samples: int = 1
    """Minimum number of samples of a rank that gets any in a short step; batch normalization needs
    two."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """This rank's part of one step's global batch. The loader passes it to the session before it
    hands out the step's first batch."""

    weight: float
    """Weight of this rank's samples: their number, unless a `weight_fn` is given; 0 for a stand-in
    batch. With a `weight_fn` and micro-batches it is NaN, because each weight is known only when
    `begin_micro_batch` passes it."""
    total_weight: float | None
    """Weight of the entire global batch if it is known without a message to other ranks, otherwise
    None."""
    micro_batches: int | None
    """Number of micro-batches of this rank in this step (may be 0); None: one plain batch per
    rank."""
    by_speed: float = 0.0
    """Number of micro-batches of this rank relative to an equal part, if they are dealt by speed; 0
    if they are not."""
    most_micro_batches: int = 0
    """Maximum number of micro-batches over all ranks. Strategies that communicate in every pass
    take part in that many passes."""


WeighRows = Callable[[Sequence[int]], list[float]]
"""Computes the weights of parts of a batch, given the number of rows of each part. Raises
ConfigurationError."""


class LoaderSession(Protocol):
    """The session from a loader's perspective."""

    def begin_step(self, source: StepSource) -> Placement:
        """Starts the next step at a step boundary, where the session handles joins, drains and
        failures.

        Blocks while the generation re-forms. In a joiner, the first call reports readiness, waits
        for a rank and receives the peers' state. The caller must therefore read its own cursor only
        after the call returns. Raises `StopTraining` if the job is stopped or this member has
        drained.

        The step exists only after `assign`. A second call before `assign` is another call at the
        same boundary. Loaders rely on this while they wait for leases, and when a joiner receives a
        cursor in a later epoch. A joiner stays a joiner until its first `assign`.
        """
        ...

    def enter_epochs(self, source: StepSource) -> int:
        """Enters `epochs()` and returns the first epoch to hand out. In a joiner, this is a step
        boundary, as in `begin_step`, and the call blocks until the run's position is known. After a
        resume, and in a joiner, other loaders count their iterations from this loop's position.
        Raises `StopTraining`, also if early stopping had ended this loop before a resume."""
        ...

    def epochs_left(self, source: StepSource) -> None:
        """Announces that the script left the loop over `epochs()` with `break`."""
        ...

    def epoch_opens(self, source: StepSource, epoch: int, *, epochs: int) -> None:
        """Announces that `epochs()` is about to hand out `epoch`. `epochs`: number of epochs of
        that loop."""
        ...

    def is_elsewhere(self, source: StepSource, epoch: int) -> bool:
        """Returns whether a joiner's script must skip this iteration, because its peers iterate
        over another loader or epoch. Known once the joiner has received the state, at its first
        boundary."""
        ...

    @property
    def waited_s(self) -> float:
        """Total time in seconds that the training thread has waited for its peers."""
        ...

    @property
    def steps_alone(self) -> bool:
        """True if each rank takes steps of its own (local_sgd, async_sgd)."""
        ...

    @property
    def speed(self) -> float | None:
        """Relative speed of this worker if the user has set one; None: measured."""
        ...

    def assign(self, share: Share) -> None:
        """Passes this rank's share of the step that has begun."""
        ...

    def sum_numbers(self, values: Sequence[float], *, or_own: bool = False) -> list[float] | None:
        """Sums numbers elementwise over all ranks, in float64. Called on all ranks in a step that
        has begun, before `assign` or after `finish_batches`. Returns None if a rank failed. Before
        `assign`, the step is then aborted, and its batches are handed out nevertheless, so that all
        scripts receive the outcome LOST. After `finish_batches`, also returns None if this rank
        learned the step's outcome in a later generation.

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
        """Announces micro-batch `index`, counted from 0 over the entire global batch, before it is
        handed out. `key`: seed, epoch, step and micro-batch, which determine its random numbers.
        `weigh`: weighs parts of the micro-batch, for strategies that split it; None: all samples
        weigh the same. Plain batches call this once, with index = rank."""
        ...

    def end_micro_batch(self) -> None:
        """Announces that the user's loop has finished the micro-batch, including its backward
        pass."""
        ...

    def finish_batches(self) -> None:
        """Ends the micro-batches of a step after the inner loop, even if this rank had none.
        Reduces the gradients of all ranks, so that they are complete before `optimizer.step()`."""
        ...

    def batch_passed(self, source: StepSource) -> None:
        """Announces that the loop requests the next batch after a step. With several models, this
        call ends a step in which some models were not updated."""
        ...

    def loop_left(self, source: StepSource) -> None:
        """Announces that an iteration was left, or that another iteration begins inside it. If a
        batch was handed out and its step is unfinished, `optimizer.step()` may still finish the
        step. Otherwise the batch was only looked at, and the next `begin_step` repeats its
        samples."""
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
        confirmed the last step. Otherwise a rank could evaluate, save or exit while another still
        repeats that step."""
        ...

    def register_source(self, source: StepSource) -> None:
        """Registers a training loader.

        The loader's constructor calls this once. The loader calls it again before its first
        `begin_step` under another session. The loader receives the cursor that a checkpoint or a
        peer stored under its name, if any. The session keeps a weak reference to the loader. Raises
        ConfigurationError if another live loader has the same name.
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
        """Leases batches first come, first served (async_sgd), from the coordinator, or locally in
        a world of one. `want`: number of batches; 0 if the loop was left. In that case all leases
        are returned except `at_hand`, which `optimizer.step()` may still finish (see
        `Leases.took_back_at_hand`)."""
        ...

    def wait_for_others(self, what: str | None) -> None:
        """Reports that this rank waits for the other ranks' part of `what`; None ends the wait. The
        coordinator evicts a rank that hangs meanwhile."""
        ...


@dataclass(frozen=True, kw_only=True)
class Leases:
    """Answer to `lease_batches`."""

    batches: tuple[int, ...]
    epoch_done: bool
    retry_after_s: float
    took_back_at_hand: bool = False
    """True if the loop was left within a round of inner steps, so that the batch at hand was
    returned too."""


class StepSource(Protocol):
    """A training loader from the session's perspective. Its state is part of the committed
    state."""

    @property
    def name(self) -> str:
        """Name that is stable across restarts and unique in the process."""
        ...

    @property
    def dealing(self) -> str:
        """Settings that, besides the cursor, determine the loader's batches; the same on all
        ranks."""
        ...

    @property
    def epoch(self) -> int:
        """Epoch of the cursor."""
        ...

    @property
    def next_epoch(self) -> int:
        """Epoch of the next iteration outside of `epochs()`; earlier epochs are over."""
        ...

    @property
    def within(self) -> int | None:
        """Epoch handed out by the loader's `epochs()`; None outside of that loop."""
        ...

    @property
    def gives_up(self) -> int | None:
        """Epoch that the script left early, so that its rest is abandoned; None if there is
        none."""
        ...

    @property
    def repeats(self) -> int | None:
        """Epoch that a resumed run repeats from its beginning, because the cursor does not contain
        the finished batches; None if there is none."""
        ...

    @property
    def next_iteration(self) -> int:
        """Epoch of the next iteration outside of `epochs()`, counted from the iterations that this
        script has passed."""
        ...

    @property
    def step(self) -> int:
        """Number of committed steps of the cursor's epoch."""
        ...

    @property
    def ends_epoch(self) -> bool:
        """True if the last step handed out is the last of its epoch, or of the loop over
        epochs."""
        ...

    @property
    def under_way(self) -> bool:
        """True if the script is inside an iteration over this loader."""
        ...

    @property
    def is_over(self) -> bool:
        """True if the cursor is after the last step of the loop that requested the boundary, so
        that no step follows."""
        ...

    @property
    def step_samples(self) -> int:
        """Number of samples of the last step handed out, over all ranks; for a leased batch, this
        rank's samples."""
        ...

    def steps_until(self, epoch: int) -> int | None:
        """Returns the number of steps from the cursor to the start of `epoch`, or to `max_steps` of
        its `epochs()`, if no loop is left early. Leased steps are counted over all ranks. None if
        unknown, as for a stream without `max_steps`."""
        ...

    def count_from(self, epoch: int | None) -> None:
        """Sets `next_epoch` to `epoch`. None restores the value in the state loaded last."""
        ...

    @property
    def leased(self) -> bool:
        """True if the batches are leased first come, first served, instead of distributed by
        rank."""
        ...

    def committed(
        self, placement: Placement, *, known: bool = False, pushed: Sequence[int] | None = None
    ) -> int:
        """Commits the last step handed out in `placement`'s generation: advances the cursor and
        writes the record. Returns the number of this rank's samples that count. `known`: another
        member had already pushed this leased batch. `pushed`: see `Step.pushed`."""
        ...

    def leaving(self) -> None:
        """Acknowledges finished batches because this process leaves the job at once."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the cursor after the last commit, as JSON."""
        ...

    def cursor_reader(self) -> Callable[[], dict[str, Any]]:
        """Returns a function that computes `state_dict()` and keeps no reference to the loader."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the cursor of a checkpoint or a peer. Drops prefetched batches."""
        ...


class StopTraining(Exception):
    """Raised inside a loader to end its iteration: the job is stopped or finished, or this member
    was drained."""


class Drained(StopTraining):
    """Raised when only this member leaves: it was asked to drain, or received SIGTERM. Ends the
    process with status 0."""


class LeftOver(StopTraining):
    """Raised in a spare when every rank that held the model is gone. The process ends and is
    restarted."""


class StateLostError(PreconditionError):
    """Raised on all remaining ranks when they hold only part of the state and can continue only
    from a checkpoint."""
