"""The user's loops over a training loader: over epochs, over steps, and over batches.

Before each step, an iteration asks the session for a step boundary. The session returns this rank's
placement (its rank, the world size and the generation), for which the `Supply` then deals the step.
The iteration ends when the run has passed the iteration's epoch or stops. `cursor.py` determines
the epoch of an iteration. Before the first boundary, the loader is registered with its session, and
gets a name if it has none.

This module owns the loader's name, the state of the current iteration, and a flag that shows
whether the last iteration was stopped. The loader is passed to methods as `source` and never
stored, so only loops in progress refer to it. The session is referenced weakly, because an
iteration may be closed while the process exits. Everything runs on the thread of the user's
training loop.
"""

from __future__ import annotations

import dis
import functools
import inspect
import logging
import math
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Final

import torch
from shoal_common.errors import ConfigurationError, PreconditionError, ShoalError

from shoal_worker.data.balance import Balance
from shoal_worker.data.cursor import LoaderProgress
from shoal_worker.data.fetch import Fetcher, Request
from shoal_worker.data.record import SampleRecord
from shoal_worker.data.sampling import Block
from shoal_worker.data.step_batches import DealtStep, Step, Supply
from shoal_worker.elastic.contract.loader_interface import (
    LoaderSession,
    Placement,
    Share,
    StepSource,
    StopTraining,
    WeighRows,
)
from shoal_worker.elastic.session.worker_process import current_loader_session
from shoal_worker.randomness import seed_generators
from shoal_worker.torch_internals import pytree

# ------------------------------------------------------------- passing a step's batches to the loop
#
# Passes the batches of a dealt step to the user's loop: fetches and weighs each batch, reports it
# to the session, and records it. A batch's weight in the mean over a step is its number of samples,
# or the result of the user's `weight_fn`. If a pipeline splits a batch, its parts are weighed in
# the same way. The run's state is elsewhere: the `DealtStep` records how many samples the loop has
# received. May be used only on the training thread.

WeightFn = Callable[[Any], float]


def weight_of(batch: Any, weight_fn: WeightFn) -> float:
    """Returns the result of `weight_fn`. Raises ConfigurationError if the result is not a valid
    weight."""
    weight = float(weight_fn(batch))
    if not math.isfinite(weight) or weight < 0:
        raise ConfigurationError(
            f"weight_fn returned {weight}; expected a finite, non-negative number"
        )
    return weight


def weights_of_rows(batch: Any, weight_fn: WeightFn, rows: Sequence[int]) -> list[float]:
    """Splits a batch into parts along its rows, and returns the weight of each part according to
    `weight_fn`. `rows`: number of rows in each part.

    Raises:
        ConfigurationError: the batch cannot be split in this way, or the parts' weights do not add
            up to the batch's weight.
    """
    leaves, structure = pytree.tree_flatten(batch)
    cut = [one for one in leaves if isinstance(one, torch.Tensor) and one.dim() > 0]
    lengths = {len(one) for one in cut}
    if lengths != {sum(rows)}:
        raise ConfigurationError(
            f"train_step received {sum(rows)} rows, but the loader's batch has tensors of "
            f"{sorted(lengths)} rows: with weight_fn=, a pipeline must train on exactly the rows "
            "that weight_fn received. Pass the batch as the loader yielded it, or remove weight_fn"
        )
    parts = [
        one.split(list(rows))
        if isinstance(one, torch.Tensor) and one.dim() > 0
        else [one] * len(rows)
        for one in leaves
    ]
    weights = [
        weight_of(pytree.tree_unflatten([part[index] for part in parts], structure), weight_fn)
        for index in range(len(rows))
    ]
    whole = weight_of(batch, weight_fn)
    if not math.isclose(sum(weights), whole, rel_tol=1e-4):
        raise ConfigurationError(
            f"weight_fn returned {whole} for a batch, but {sum(weights)} in total for its "
            f"{len(rows)} micro-batches: a pipeline needs weights that add up, such as numbers of "
            "samples or tokens, computed from tensors with one row per sample"
        )
    return weights


_STAND_IN = (
    "a copy of another rank's batch. The copy has weight 0 in training, and sums over batches "
    "must not count it either: multiply by loader.batch_weight, which is 0 here, instead of the "
    "length of the batch"
)
_SINGLE_SAMPLE = (
    'a batch of one. The model has batch normalization, which raises "Expected more than 1 value '
    'per channel" if a sample has one value per channel. Use a batch of at least 2 samples for '
    "each rank that may join, micro-batches and shards that leave no single sample over, "
    "drop_last=True (of the loader, or the Trainer's) if only the last step is short, or "
    "SyncBatchNorm"
)


class Delivery:
    """Hands out the batches of a loader's steps to the user's loop."""

    def __init__(
        self,
        supply: Supply,
        fetcher: Fetcher,
        *,
        in_micro_batches: bool,
        weight_fn: Callable[[Any], float] | None,
        record: SampleRecord | None,
        balance: Balance,
        seed: int,
    ) -> None:
        self.failed = False
        """True if creating a batch failed. Reset at the start of an iteration."""
        self.batch_weight = 0.0
        """Weight, in the mean over its step, of the last batch passed to the loop. 0 for a
        stand-in, which a rank without samples receives."""
        self._warned: set[str] = set()
        self._at_hand: Request | None = None
        self._supply = supply
        self._fetcher = fetcher
        self._in_micro_batches = in_micro_batches
        self._weight_fn = weight_fn
        self._record = record
        self._balance = balance
        self._seed = seed

    def step(self, dealt: DealtStep, session: LoaderSession, loader: str) -> Step:
        """Returns the step for the user's loop. With micro-batches, also reports this rank's share
        of the step (such as its number of micro-batches) to the session. Without micro-batches, the
        share is reported when the batch is created, because its weight may be computed from the
        batch. Seeds the random generators, because the loop may draw before it requests the first
        of the step's batches."""
        if self._in_micro_batches:
            weighed = self._weight_fn is not None
            weight = math.nan if weighed else float(sum(map(len, dealt.blocks)))
            total = None if weighed else float(len(dealt.positions))
            session.assign(
                Share(
                    weight=weight,
                    total_weight=total,
                    micro_batches=len(dealt.blocks),
                    of_equal=self._balance.share(dealt, len(dealt.blocks)),
                    most_micro_batches=dealt.most_blocks,
                )
            )
            self._balance.offer(dealt, session)
        seed_generators((self._seed, dealt.epoch, dealt.number))
        return Step(dealt, self._hand_out(dealt, session, loader))

    def peek(self) -> Any:
        """Returns the batch that will probably follow the current one. Returns None if the epoch
        has no further batch, or the next batch is not known."""
        dealt = self._supply.current
        request = (
            self._supply.upcoming(dealt, self._at_hand)
            if dealt is not None and self._at_hand is not None
            else None
        )
        return None if request is None else self._fetcher.peek(request)

    def _hand_out(self, dealt: DealtStep, session: LoaderSession, loader: str) -> Iterator[Any]:
        for block in dealt.blocks:
            if self._supply.current is not dealt:
                raise PreconditionError(
                    f"step {dealt.number} of epoch {dealt.epoch} has ended, so its batches are "
                    "no longer available; call peek() inside the loop over the step"
                )
            self._balance.begin(dealt, session)
            request = self._supply.request(dealt, block)
            try:
                batch = self._fetcher.fetch(
                    request, functools.partial(self._supply.following, dealt, request)
                )
            except Exception:  # of any kind, because it is raised again
                self.failed = True
                raise
            weight = self._weight(batch, block)
            if not self._in_micro_batches:
                session.assign(
                    Share(
                        weight=weight,
                        total_weight=self._total_weight(dealt, weight),
                        micro_batches=None,
                    )
                )
            session.begin_micro_batch(
                index=block.index,
                weight=weight,
                samples=len(block),
                key=request.key,
                weigh=self._weigh_rows(batch, block),
            )
            self._note(dealt, block, loader)
            self._at_hand, self.batch_weight = request, weight
            if not len(block):
                self._warn_once(_STAND_IN, dealt, loader)
            if len(block) == 1 < min(dealt.placement.least_samples, dealt.placement.world_size):
                self._warn_once(_SINGLE_SAMPLE, dealt, loader)
            dealt.handed_out += len(block)
            yield batch
            session.end_micro_batch()
            self._balance.end(len(block), session)
        if self._in_micro_batches:
            session.finish_batches()
            self._balance.exchange(dealt, session, loader)

    def _warn_once(self, consequence: str, dealt: DealtStep, loader: str) -> None:
        """Warns that a step has too few samples for the ranks, and names the consequence for this
        rank. Each consequence is logged only once."""
        if consequence in self._warned:
            return
        self._warned.add(consequence)
        _log.warning(
            "loader %r: step %d of epoch %d has %d samples for %d ranks, so rank %d received %s",
            loader,
            dealt.number,
            dealt.epoch,
            len(dealt.positions),
            dealt.placement.world_size,
            dealt.placement.rank,
            consequence,
        )

    def _weight(self, batch: Any, block: Block) -> float:
        if self._weight_fn is None or not len(block):
            return float(len(block))
        return weight_of(batch, self._weight_fn)

    def _weigh_rows(self, batch: Any, block: Block) -> WeighRows | None:
        if self._weight_fn is None or not len(block):
            return None
        return functools.partial(weights_of_rows, batch, self._weight_fn)

    def _total_weight(self, dealt: DealtStep, weight: float) -> float | None:
        if self._supply.leased:
            return weight
        return None if self._weight_fn is not None else float(len(dealt.positions))

    def _note(self, dealt: DealtStep, block: Block, loader: str) -> None:
        if self._record is None or not dealt.placement.leads_replica:
            return
        self._record.write(
            "dealt",
            loader=loader,
            generation=dealt.placement.generation,
            epoch=dealt.epoch,
            step=dealt.number,
            rank=dealt.placement.rank,
            index=block.index,
            begin=dealt.positions.start,
            first=block.positions.start,
            **self._supply.account(dealt, block),
        )


# -------------------------------------------------------------------------------------------- loops

_unnamed: weakref.WeakKeyDictionary[LoaderSession, int] = weakref.WeakKeyDictionary()
"""Number of unnamed loaders in each session. Ranks that are threads of one process have separate
sessions."""


class Introduction:
    """Registers a loader with the current session, and again whenever the session changes."""

    def __init__(self, name: str) -> None:
        """`name`: name of the loader; empty for a training loader without a given name."""
        self.name = name
        self._session: weakref.ref[LoaderSession] | None = None

    def session(self, source: StepSource) -> LoaderSession:
        """Returns the current session. Registers the loader `source` if the session is new."""
        session = current_loader_session()
        if self.met is not session:
            if not self.name:
                _unnamed[session] = _unnamed.get(session, 0) + 1
                self.name = "loader" if _unnamed[session] == 1 else f"loader-{_unnamed[session]}"
            self._session = weakref.ref(session)
            session.register_source(source)
        return session

    @property
    def met(self) -> LoaderSession | None:
        """The session with which the loader was last registered; None if there is none or it no
        longer exists."""
        return self._session() if self._session is not None else None


_log = logging.getLogger(__name__)

_NOTHING_LEFT = (
    "this iteration of loader {!r} yields no batches, because the run is past that epoch (after "
    "a resume, or in a joiner) or was stopped; to inspect a batch, take it from the dataset, or "
    "from a loader with train=False"
)


class Iterations:
    """The user's loops over one loader: over epochs, steps and batches."""

    def __init__(
        self,
        introduction: Introduction,
        progress: LoaderProgress,
        supply: Supply,
        delivery: Delivery,
        fetcher: Fetcher,
    ) -> None:
        self.under_way = False
        """True if an iteration is in progress; see `StepSource.under_way`."""
        self._introduction = introduction
        self._progress = progress
        self._supply = supply
        self._delivery = delivery
        self._fetcher = fetcher
        self._stopped = False
        self._last_epoch = 0
        """Last epoch that the current loop trains."""
        self._ended_within = False
        """True if the last iteration ended in the middle of its epoch, because the loop had taken
        all its steps."""

    @property
    def is_over(self) -> bool:
        """True if the loop has no further step; see `StepSource.is_over`."""
        return self._progress.is_past(self._last_epoch) or self._progress.has_all_steps

    def epochs(self, source: StepSource, n: int, max_steps: int | None) -> Iterator[int]:
        """Implements `ElasticDataLoader.epochs`."""
        progress, session = self._progress, self._introduction.session
        limits = [str(n)] if n != sys.maxsize else []
        limits += [f"max_steps={max_steps}"] if max_steps is not None else []
        call = f"epochs({', '.join(limits)})"
        if max_steps is not None:
            self._supply.limit(max_steps)
            n = min(n, self._supply.epochs_of(max_steps))
        self._last_epoch = n - 1
        try:
            epoch = session(source).enter_epochs(source, call=call)
            self._stopped = False
            while epoch < n and not self._stopped and not progress.has_all_steps:
                progress.within = epoch
                session(source).epoch_opens(source, epoch, epochs=n, call=call)
                yield epoch
                # After a return to a checkpoint, steps of an epoch that ended early are repeated.
                epoch = max(epoch + (not self._ended_within), progress.cursor.epoch)
        except StopTraining:
            return
        except GeneratorExit:
            progress.leave_epochs(epoch)
            met = self._introduction.met
            # a stopped run may have left the loop before the end of an epoch
            if met is not None and not self._stopped and _left_by_for():
                met.epochs_left(source)
            raise
        finally:
            progress.within = None
            self._supply.limit(None)

    def steps(self, source: StepSource) -> Iterator[Step]:
        """Yields the steps of one iteration."""
        progress = self._progress
        epoch, began = progress.next_iteration, list[int]()
        # closes an older iterator that is waiting at a batch, if there is one
        self._introduction.session(source).loop_left(source)
        self._delivery.failed = False
        over = stopped_within = self._ended_within = False
        try:
            yield from self._epoch_steps(source, epoch, began)
            # An epoch in which training was stopped or took its last step is neither finished nor
            # abandoned: a run resumed from a checkpoint saved now continues in it.
            stopped_within = self._stopped and progress.cursor.epoch == epoch
            over = not stopped_within and not self._ended_within
        except GeneratorExit:
            # The script left the loop early. After an error in the dataset, it may enter the loop
            # again, which then continues in the same epoch.
            over = (
                bool(began) and progress.cursor.global_step > began[0] and not self._delivery.failed
            )
            if (session := self._introduction.met) is not None:
                session.loop_left(source)
                if _left_by_for():
                    session.loop_ended()
            raise
        finally:
            self.under_way = stopped_within
            if over:
                progress.end_iteration(epoch)
            self._fetcher.close()
            self._supply.rest()
            self.acknowledge()

    def batches(self, source: StepSource) -> Generator[Any, None, str | None]:
        """Yields the batches of one iteration. If there are none, returns the reason, which becomes
        the message of the StopIteration."""
        nothing = True
        for step in self.steps(source):
            nothing = False
            yield from step
        # Message of the StopIteration raised by `next(iter(loader))`. A for loop never sees it.
        return _NOTHING_LEFT.format(source.name) if nothing else None

    def acknowledge(self) -> None:
        """Reports finished leased batches to the coordinator when the loop ends. Logs a warning if
        that fails."""
        session = self._introduction.met
        if session is None:
            return
        try:
            self._supply.acknowledge(session)
        except (ShoalError, StopTraining) as error:
            name = self._introduction.name
            _log.warning(
                "loader %s: the last batches could not be acknowledged and will be dealt again: %s",
                name,
                error,
            )

    def _epoch_steps(self, source: StepSource, epoch: int, began: list[int]) -> Iterator[Step]:
        """Yields the steps of an epoch. `began`: list to which the number of steps committed before
        this iteration's first step is appended. A joiner knows this number only after its first
        step boundary.
        """
        progress = self._progress
        if self._is_over(source, epoch, self._introduction.session(source)):
            self._note_end(epoch)
            self._pass_over(source)
            return
        self.under_way = True
        # before the step boundary, because a joiner may receive this cursor there
        progress.move_to(epoch)
        took_part = False
        while not self._is_over(source, epoch, session := self._introduction.session(source)):
            placement = self._begin(source, epoch, session)
            if placement is None:
                return
            if self._is_over(source, epoch, session):
                break
            if not took_part:
                began.append(progress.cursor.global_step)
            took_part = True
            progress.take_part(epoch)
            try:
                dealt = self._supply.take(placement, session, source.name)
            except StopTraining:  # while this rank waited for one of its batches
                self._stopped = True
                return
            if dealt is not None:
                yield self._delivery.step(dealt, session, source.name)
                session.batch_passed(source)
        self._note_end(epoch)
        if took_part:
            self._end_epoch(source)
        else:
            self._pass_over(source)

    def _note_end(self, epoch: int) -> None:
        """Records whether an iteration of `epoch` ended in the middle of the epoch, because the run
        had reached the `max_steps` of the loop over epochs."""
        progress = self._progress
        self._ended_within = progress.has_all_steps and progress.cursor.epoch == epoch

    def _pass_over(self, source: StepSource) -> None:
        """Notifies the session that this iteration took no step. Does nothing within `epochs()`."""
        if self._progress.within is None:
            self._introduction.session(source).passed_over(source)

    def _is_over(self, source: StepSource, epoch: int, session: LoaderSession) -> bool:
        """Returns whether `epoch` has ended on this rank: the run has finished or abandoned the
        epoch or has reached `max_steps`, or this rank is a joiner whose peers are in a different
        epoch."""
        return (
            self._progress.is_past(epoch)
            or self._progress.has_all_steps
            or session.is_elsewhere(source, epoch)
        )

    def _begin(self, source: StepSource, epoch: int, session: LoaderSession) -> Placement | None:
        """Begins the next step and returns its placement. Returns None if this rank should stop."""
        self._supply.drop()
        self._stopped = False
        self._last_epoch = epoch
        try:
            return session.begin_step(source)
        except StopTraining:
            self._stopped = True
            return None

    def _end_epoch(self, source: StepSource) -> None:
        session = self._introduction.session(source)
        session.loop_ended()
        try:
            session.end_epoch(source)
        except StopTraining:
            self._stopped = True


_DROPS: Final = frozenset({"POP_TOP", "POP_ITER"})
"""Bytecode instructions of a `for` statement that drop its iterator on `break` or `return`."""


def _left_by_for() -> bool:
    """Returns whether the calling generator is being closed by a `for` statement that the script
    has left, for example with `break`. If so, no code of the script has run since the loop's body.
    In contrast, an iterator used with `next()` is closed when the script drops it, perhaps much
    later."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in _DROPS
