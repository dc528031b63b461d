"""Contract between the elastic session and the loaders. The contract with engines is in
`strategy_interface.py`.

The session owns the generation and decides when a step begins, is committed or is aborted. Loaders
only distribute samples and keep a cursor. The protocols below define how the two interact. All
calls run on the thread of the user's training loop.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shoal_common.errors import PreconditionError


class StepStatus(enum.Enum):
    """Outcome of a step, the same on every rank that survives the step. COMMITTED is truthy and the
    other outcomes are falsy, so side effects can follow `if optimizer.step():`."""

    COMMITTED = "committed"
    """All ranks contributed to the step, and every surviving rank has applied it or is about to.
    Only a return to an older checkpoint can undo it."""
    LOST = "lost"
    """A fault aborted the step: no rank applied it, and the loader deals the same samples
    again."""

    PENDING = "pending"
    """One of several models has been updated. The step's outcome will be known after the last
    model's update, or when the next batch is requested."""

    def __bool__(self) -> bool:
        return self is StepStatus.COMMITTED


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The generation in which a step takes place, and this process's rank in it."""

    generation: int
    """Number of the agreed generation; 0 in a world of one without a coordinator."""
    rank: int
    """Data-parallel rank of this process's replica, which determines its samples. It equals the
    global rank unless a model is split across several ranks."""
    world_size: int
    """Number of data-parallel replicas."""
    leads_replica: bool = True
    """True if this rank counts and records the samples of its replica. All ranks of a replica
    receive the same samples."""
    least_samples: int = 1
    """Minimum number of samples per rank in a step with fewer samples than usual; a rank gets
    either none or at least this number. Batch normalization needs two."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """This rank's part of one step's global batch. The loader passes the share to the session
    before it hands out the step's first batch."""

    weight: float
    """Weight of this rank's samples in the mean over the global batch: the number of samples,
    unless a `weight_fn` is given. 0 if the rank has no samples and only processes a placeholder
    batch. With a `weight_fn` and micro-batches it is NaN, because each weight is known only when it
    is passed to `begin_micro_batch`."""
    total_weight: float | None
    """Weight of the global batch; None if it is known only after communication with the other
    ranks."""
    micro_batches: int | None
    """Number of micro-batches of this rank in this step (may be 0); None: the step has one plain
    batch per rank."""
    of_equal: float = 0.0
    """This rank's number of micro-batches divided by an equal share, if micro-batches are dealt by
    speed or a step has fewer micro-batches than ranks; otherwise 0."""
    most_micro_batches: int = 0
    """Largest number of micro-batches on any rank. If the strategy communicates in every pass, each
    rank runs this number of passes, some of them without a micro-batch of its own."""


WeighRows = Callable[[Sequence[int]], list[float]]
"""Function that computes the weight of each part of a batch, given the parts' numbers of rows.
Raises ConfigurationError."""


class LoaderSession(Protocol):
    """Interface of the session, as used by loaders."""

    def begin_step(self, source: StepSource) -> Placement:
        """Begins the next step at a step boundary, where the session handles joins, drains and
        failures.

        Blocks while a new generation forms. In a joiner, the first call reports readiness, waits
        for a rank and receives the peers' state. The loader must therefore read its own cursor only
        after the call has returned. Raises `StopTraining` if the job is stopped or this member has
        drained.

        `assign` creates the step. Until `assign` is called, further calls handle the same boundary
        again. Loaders rely on this while they wait for leases, and if a joiner receives a cursor
        that is in a later epoch. A joiner counts as a joiner until its first `assign`."""
        ...

    def enter_epochs(self, source: StepSource, *, call: str) -> int:
        """Enters `epochs()` and returns the first epoch to hand out. In a joiner, this is a step
        boundary, as in `begin_step`, and the call blocks until the run's position is known. After a
        resume, and in a joiner, the iteration counts of the other loaders are set to their values
        at this position. `call`: the script's call, such as "epochs(90)". Raises `StopTraining`,
        for example if early stopping ended this loop before a resume."""
        ...

    def epochs_left(self, source: StepSource) -> None:
        """Notifies the session that the script has left the loop over `epochs()` with `break`."""
        ...

    def epoch_opens(self, source: StepSource, epoch: int, *, epochs: int, call: str) -> None:
        """Notifies the session that `epochs()` is about to hand out `epoch`. `epochs`: number of
        epochs of that loop. `call`: as in `enter_epochs`."""
        ...

    def is_elsewhere(self, source: StepSource, epoch: int) -> bool:
        """Returns whether a joiner's script must skip this iteration, because its peers iterate
        over a different loader or epoch. The answer is known once the joiner has received the
        state, at its first step boundary."""
        ...

    @property
    def waited_s(self) -> float:
        """Total time in seconds that the training thread has waited for its peers."""
        ...

    @property
    def steps_alone(self) -> bool:
        """True if each rank takes steps independently of the others (local_sgd, async_sgd)."""
        ...

    @property
    def speed(self) -> float | None:
        """Relative speed that the user has set for this worker; None: the speed is measured."""
        ...

    def assign(self, share: Share) -> None:
        """Creates the step with this rank's share of the global batch."""
        ...

    def sum_numbers(self, values: Sequence[float], *, or_own: bool = False) -> list[float] | None:
        """Sums numbers elementwise across all ranks, in float64. Must be called on all ranks, after
        `begin_step` and before `assign`, or after `finish_batches`. Returns None if a rank failed.
        If that happens before `assign`, the step is aborted; its batches are still handed out, so
        that all scripts receive the outcome LOST. After `finish_batches`, None is also returned if
        this rank learned the step's outcome in a later generation.

        Args:
            values: the same number of values on all ranks.
            or_own: if ranks take independent steps, return `values` instead of raising an error.

        Raises:
            ConfigurationError: under this strategy, ranks take independent steps, and `or_own` is
                False.
        """
        ...

    def offer_numbers(self, values: Sequence[float]) -> None:
        """Offers numbers to be summed across all ranks at the end of a round (local_sgd). If the
        current step ends its round, the ranks' offers are summed elementwise, in float64, together
        with the averages, and `StepSource.committed` receives the sums. Otherwise, and under
        strategies without rounds, the offer has no effect. Must be called after `assign`, on all
        ranks, with the same number of values. Does not communicate."""
        ...

    def begin_micro_batch(
        self,
        *,
        index: int,
        weight: float,
        samples: int,
        key: Sequence[int],
        weigh: WeighRows | None,
    ) -> None:
        """Notifies the session that micro-batch `index` is about to be handed out. The index counts
        from 0 over the entire global batch. `samples`: number of samples in the micro-batch, which
        may differ from its weight. `key`: seed, epoch, step and micro-batch, from which the global
        random generators are seeded. `weigh`: computes the weights of parts of the micro-batch, for
        strategies that split it; None: all samples have the same weight. In a step without
        micro-batches, called once, with the rank as index."""
        ...

    def end_micro_batch(self) -> None:
        """Notifies the session that the user's loop has finished with the micro-batch, including
        its backward pass."""
        ...

    def finish_batches(self) -> None:
        """Reduces the gradients of all ranks, so that they are complete before `optimizer.step()`.
        Called after the loop over a step's micro-batches, even if this rank had none."""
        ...

    def batch_passed(self, source: StepSource) -> None:
        """Notifies the session that the loop requests the next batch after a step. If there are
        several models and some were not updated in the step, this call ends the step."""
        ...

    def loop_left(self, source: StepSource) -> None:
        """Notifies the session that the script has left an iteration over a loader, or has begun
        another iteration inside it. If a batch was handed out and its step is unfinished,
        `optimizer.step()` may still finish the step. Otherwise the script has only looked at the
        batch, and the next `begin_step` hands out the same samples again."""
        ...

    def loop_ended(self) -> None:
        """Notifies the session that a `for` loop over a loader has ended, before the script does
        anything else."""
        ...

    def passed_over(self, source: StepSource) -> None:
        """Notifies the session that an iteration over a training loader has ended without a step,
        because the run has already taken all of the iteration's steps or will take no more steps.
        """
        ...

    def end_epoch(self, source: StepSource) -> None:
        """Ends an epoch of a training loader, after its last step. Returns once every rank has
        confirmed the last step. Without this wait, a rank could evaluate, save or exit while
        another rank is still repeating that step."""
        ...

    def register_source(self, source: StepSource) -> None:
        """Registers a training loader.

        Called by the loader's constructor, and again before the loader's first `begin_step` under a
        different session. The loader receives the cursor stored under its name by a checkpoint or a
        peer, if there is one. The session keeps a weak reference to the loader. Raises
        ConfigurationError if another loader with the same name still exists.
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
        a world of one.

        Args:
            finished: batches that this rank has trained on, to be acknowledged.
            want: number of batches to lease. 0 if the script has left the loop: all leases are then
                given back, except the lease of `at_hand`.
            at_hand: batch whose step is unfinished; `optimizer.step()` may still finish it (see
                `Leases.took_back_at_hand`).
        """
        ...

    def wait_for_others(self, what: str | None) -> None:
        """Records that this rank is now waiting until other ranks have done their part of `what`;
        None: the wait has ended. If another rank hangs during the wait, the coordinator evicts that
        rank."""
        ...


@dataclass(frozen=True, kw_only=True)
class Leases:
    """Result of `LoaderSession.lease_batches`."""

    batches: tuple[int, ...]
    epoch_done: bool
    retry_after_s: float
    took_back_at_hand: bool = False
    """True if the script left the loop within a round of inner steps. The lease of the batch whose
    step is unfinished was then given back as well."""


class StepSource(Protocol):
    """Interface of a training loader, as used by the session. Its state is part of the committed
    state."""

    @property
    def name(self) -> str:
        """Name of the loader: stable across restarts, and unique in the process."""
        ...

    @property
    def dealing(self) -> str:
        """Settings that, together with the cursor, determine the loader's batches; must be the same
        on all ranks."""
        ...

    @property
    def epoch(self) -> int:
        """Epoch of the cursor."""
        ...

    @property
    def next_epoch(self) -> int:
        """Epoch that the next iteration outside of `epochs()` will cover. All earlier epochs are
        finished or abandoned."""
        ...

    @property
    def within(self) -> int | None:
        """Last epoch handed out by the loader's `epochs()`; None outside of that loop."""
        ...

    @property
    def gives_up(self) -> int | None:
        """Epoch whose remaining batches are abandoned because the script left the loop over its
        batches early; None if there is none."""
        ...

    @property
    def repeats(self) -> int | None:
        """Epoch that a resumed run repeats from its beginning, because the cursor does not record
        which of its batches were finished; None if there is none."""
        ...

    @property
    def next_iteration(self) -> int:
        """Epoch that the next iteration outside of `epochs()` would cover if it depended only on
        the iterations of this process's script, and not on a loaded state."""
        ...

    @property
    def step(self) -> int:
        """Number of committed steps in the cursor's epoch."""
        ...

    @property
    def ends_epoch(self) -> bool:
        """True if the step handed out last is the final step of its epoch, or of the loop over
        epochs."""
        ...

    @property
    def under_way(self) -> bool:
        """True if the script is inside an iteration over this loader."""
        ...

    @property
    def is_over(self) -> bool:
        """True if the loop that has reached the current step boundary takes no further step."""
        ...

    @property
    def step_samples(self) -> int:
        """Number of samples of the step handed out last, summed over all ranks. For a leased batch,
        only this rank's samples are counted."""
        ...

    def steps_until(self, epoch: int) -> int | None:
        """Returns the number of steps from the cursor to the start of `epoch`, or to `max_steps` of
        the enclosing `epochs()` if that comes first, assuming that no loop is left early. Leased
        steps are counted over all ranks. Returns None if the number is unknown, as for a stream
        without `max_steps`."""
        ...

    def count_from(self, epoch: int | None) -> None:
        """Sets `next_epoch` to `epoch`, or to its value in the last loaded state if `epoch` is
        None."""
        ...

    @property
    def leased(self) -> bool:
        """True if the batches are leased first come, first served, instead of distributed by
        rank."""
        ...

    def committed(
        self,
        placement: Placement,
        *,
        known: bool = False,
        pushed: Sequence[int] | None = None,
        summed: Sequence[float] | None = None,
    ) -> int:
        """Commits the step that was handed out last, in the generation of `placement`: advances the
        cursor and, if the loader keeps a record of its steps, adds the step to it. Returns the
        number of samples that this rank must count. `known`: True if another member had already
        pushed this leased batch. `pushed`, `summed`: see `Step`."""
        ...

    def leaving(self) -> None:
        """Reports finished leased batches to the coordinator, because this process is about to
        leave the job."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the cursor after the last commit, as JSON."""
        ...

    def cursor_reader(self) -> Callable[[], dict[str, Any]]:
        """Returns a function that computes `state_dict()` without keeping a reference to the
        loader."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the cursor of a checkpoint or a peer. Drops prefetched batches."""
        ...


class StopTraining(Exception):
    """Raised inside a loader to end its iteration: the job has been stopped or has finished, or
    this member has been drained."""


class Drained(StopTraining):
    """Raised when only this member leaves, because it was asked to drain or received SIGTERM. The
    process then exits with status 0."""


class LeftOver(StopTraining):
    """Raised in a spare if no remaining rank has part of the model. The process exits, and the
    launcher restarts it."""


class StateLostError(PreconditionError):
    """Raised on all remaining ranks if together they have only part of the state and must continue
    from a checkpoint."""
