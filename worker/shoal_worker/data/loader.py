"""The loader: hands the user's loop the samples of each step that fall to this rank, and keeps the cursor.

It asks the session for a border before each step (`StepClock.begin_step`), deals the step by the placement it gets, and moves the cursor
only when the session says that the step is committed. What was handed out and not committed is dealt again. It decides nothing about
membership and reduces nothing. All of it runs on the thread of the user's training loop.

Which epoch an iteration is: inside `epochs()`, the one that stands there; else the k-th iteration is epoch k, where one that is broken off
before its first commit (`next(iter(loader))`, to look at a batch) does not count. An iteration of an epoch that is over yields nothing; of
the cursor's, the rest; of a later one, all of it: leaving a loop early gives up what remained of the epoch.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

from shoal_common.errors import ConfigurationError, CorruptDataError, InternalError, PreconditionError, ShoalError
from torch.utils.data import default_collate

from shoal_worker.data.arguments import check_dataset, check_rest, check_sizes
from shoal_worker.data.cursor import Cursor
from shoal_worker.data.dealer import Dealer
from shoal_worker.data.evaluation import EvaluationBatches
from shoal_worker.data.fetch import Fetcher, Request
from shoal_worker.data.leases import LeasedBatches
from shoal_worker.data.orders import EpochOrders
from shoal_worker.data.plan import Block, EpochPlan
from shoal_worker.data.record import SampleRecord
from shoal_worker.data.step import DealtStep, Step
from shoal_worker.elastic.contract import Placement, Share, StepClock, StopTraining
from shoal_worker.elastic.current import current_clock
from shoal_worker.settings import WorkerSettings

_log = logging.getLogger(__name__)

_STATE_VERSION = 1
_NOTHING_LEFT = (
    "this iteration of loader {!r} has no batches: the run is past its epoch (after a resume, or in a joiner), or stopped; to only look at "
    "a batch, take it from the dataset, or from a loader with train=False"
)
_unnamed: weakref.WeakKeyDictionary[StepClock, int] = weakref.WeakKeyDictionary()
"""How many loaders without a name each session has seen. Ranks that are threads of one process have a session each."""


class ElasticDataLoader:
    """Deals a map-style dataset to the ranks of an elastic job: each sample exactly once an epoch, with a constant global batch.

    Three forms. With `global_batch_size` alone, `for batch in loader` is one step an iteration, and each rank gets its part of the global
    batch. With `micro_batch_size`, `for step in loader.steps(): for batch in step`. With `batch_size` (async_sgd), whole batches are leased
    first come first served. `train=False` makes a loader for `evaluate`; iterated directly, it yields every batch here.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        weight_fn: Callable[[Any], float] | None = None,
        name: str | None = None,
        train: bool = True,
    ) -> None:
        """
        Args:
            dataset: has `__len__` and `__getitem__` (and perhaps `__getitems__`, which takes a list of indices).
            global_batch_size: samples in a step over all ranks; the same whatever their number.
            micro_batch_size: samples in a micro-batch, the unit that is dealt to ranks then.
            batch_size: samples in a leased batch (async_sgd). Exactly one of this and `global_batch_size`.
            seed: of the order, and of the random numbers that datasets, models and the loop draw from the global generators of torch,
                NumPy and Python, which are seeded for each batch; the same on every rank.
            shuffle: a new order each epoch; else the dataset's. Without effect beside `sampler` and with `train=False`.
            drop_last: leave out the last step of an epoch if it is short.
            sampler: draws each epoch's indices instead, once per epoch; must draw the same on every rank.
            collate_fn: makes a batch of a list of samples; None: torch's `default_collate`.
            num_workers: processes that fetch ahead; 0: fetch in the loop.
            pin_memory: put batches in page-locked memory, where there is an accelerator.
            weight_fn: a batch's weight in the mean over the step, in place of its number of samples (unmasked tokens, say).
            name: tells several loaders apart in checkpoints; the same in every rank and after a restart. None: by order of construction.
            train: False for evaluation: takes no part in steps. Batches are those of `micro_batch_size` or, without it, of the other size.

        Raises:
            ConfigurationError: arguments that cannot work, or a dataset that cannot be sharded by position.
        """
        check_dataset(dataset)
        check_sizes(global_batch_size, micro_batch_size, batch_size, train=train)
        check_rest(seed=seed, num_workers=num_workers, name=name, drop_last=drop_last, train=train)
        self.dataset = dataset
        size = global_batch_size or batch_size or 0
        self._micro_batch_size = micro_batch_size
        self._is_leased = train and batch_size is not None
        self._seed = seed
        self._shuffle = train and shuffle
        self._weight_fn = weight_fn
        self._orders = EpochOrders(dataset_length=len(dataset), seed=seed, shuffle=self._shuffle, sampler=sampler)
        self._dealer = Dealer(self._orders, batch_size=size, micro_batch_size=micro_batch_size, drop_last=drop_last, seed=seed)
        self._num_workers = num_workers
        self._fetcher = Fetcher(
            dataset,
            collate_fn=collate_fn or default_collate,
            num_workers=num_workers,
            pin_memory=pin_memory,
            leaves_no_trace=not train,  # training seeds them for each batch
        )

        self._cursor = Cursor()
        self._dealt: DealtStep | None = None
        self._leases: LeasedBatches | None = None
        self._next_epoch = 0
        self._loaded_next_epoch = 0
        """As the state loaded last had it. The script may still have to pass over iterations to get there."""
        self._under_way = False
        self._within: int | None = None
        self._stopped = False
        self._fetch_failed = False

        if len(self.plan) == 0:
            raise ConfigurationError(
                f"drop_last=True leaves no step: {self.plan.length} samples are fewer than one batch of {size}; "
                "make the batch smaller or keep the last one"
            )
        self._evaluation: EvaluationBatches | None = None
        self._record: SampleRecord | None = None
        self._session: weakref.ref[StepClock] | None = None
        self._name = name or ("" if train else "evaluation")
        if train:
            settings = WorkerSettings()
            if settings.record_dir is not None:
                self._record = SampleRecord(settings.record_dir, settings.member_id)
            self._clock()
        else:
            self._evaluation = EvaluationBatches(orders=self._orders, fetcher=self._fetcher, size=micro_batch_size or size, seed=seed)

    @property
    def name(self) -> str:
        """Stable over restarts, unique among the training loaders of a session."""
        return self._name

    @property
    def epoch(self) -> int:
        """The epoch that the cursor is in."""
        return self._cursor.epoch

    @property
    def step(self) -> int:
        """Steps of that epoch that are committed."""
        return self._cursor.step

    @property
    def next_epoch(self) -> int:
        """See `StepSource.next_epoch`."""
        return max(self._next_epoch, self._loaded_next_epoch)

    @property
    def ends_epoch(self) -> bool:
        """See `StepSource.ends_epoch`."""
        dealt = self._dealt
        if dealt is None or self._is_leased:
            return False
        return self._cursor.after_step(dealt.positions, self._dealer.plan(dealt.epoch)).epoch > dealt.epoch

    @property
    def under_way(self) -> bool:
        """See `StepSource.under_way`."""
        return self._under_way

    def count_from(self, epoch: int | None) -> None:
        """See `StepSource.count_from`."""
        self._next_epoch = self._loaded_next_epoch if epoch is None else epoch

    @property
    def global_step(self) -> int:
        """Steps committed so far, over all epochs; in the leased form those of this rank."""
        return self._cursor.global_step

    @property
    def plan(self) -> EpochPlan:
        """How the cursor's epoch becomes steps."""
        return self._dealer.announced_plan(self._cursor.epoch)

    def __len__(self) -> int:
        """Steps in a whole epoch, whatever the world; batches in the leased form (over all ranks) and for evaluation."""
        return len(self.plan) if self._evaluation is None else len(self._evaluation)

    # ---------------------------------------------------------------------------------------------- for the training loop

    def epochs(self, n: int) -> Iterator[int]:
        """The epochs from where the run stands (after a resume, or in a joiner) up to `n`: `for epoch in loader.epochs(90)`.

        Ends early when the job is stopped.
        """
        self._refuse_evaluation("epochs()")
        return self._epochs(n)

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches, one a step; of an evaluation loader, every batch.

        Raises:
            ConfigurationError: the loader has micro-batches; iterate `steps()`.
        """
        if self._evaluation is not None:
            return iter(self._evaluation)
        if self._micro_batch_size is not None:
            raise ConfigurationError(
                f"micro_batch_size={self._micro_batch_size} is set, so one step is several batches, or none on some ranks: write "
                "`for step in loader.steps():` and inside it `for batch in step:`, with optimizer.step() after the inner loop"
            )
        return self._batches()

    def steps(self) -> Iterator[Step]:
        """One `Step` a global batch; iterate each for this rank's batches of it."""
        self._refuse_evaluation("steps()")
        return self._iteration()

    def evaluation_batches(self) -> EvaluationBatches:
        """The batches of an evaluation loader by number, for `evaluate` to deal to the ranks.

        Raises:
            ConfigurationError: this is a training loader.
        """
        if self._evaluation is None:
            raise ConfigurationError(
                f"loader {self._name!r} is a training loader, and evaluating with it would move its cursor; make one with train=False"
            )
        return self._evaluation

    # --------------------------------------------------------------------------------------------------- for the session

    @property
    def leased(self) -> bool:
        """See `StepSource.leased`."""
        return self._is_leased

    def leaving(self) -> None:
        """See `StepSource.leaving`."""
        self._acknowledge()

    def committed(self, placement: Placement) -> int:
        """See `StepSource.committed`."""
        dealt, self._dealt = self._dealt, None
        if dealt is None:
            raise InternalError(f"loader {self._name!r} was told of a commit, but no step of it is under way")
        place = {"loader": self._name, "generation": placement.generation, "epoch": dealt.epoch, "step": dealt.number}
        if self._is_leased:
            assert self._leases is not None
            self._leases.finish()
            self._cursor = self._cursor.after_leased_batch()
        else:
            self._cursor = self._cursor.after_step(dealt.positions, self._dealer.plan(dealt.epoch))
        if self._record is not None and self._is_leased:
            self._record.write("finished", **place)
        elif self._record is not None:
            self._record.write("committed", **place, begin=dealt.positions.start)
        return dealt.handed_out

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the last commit, in samples, and what its meaning depends on. JSON-able."""
        return {
            "version": _STATE_VERSION,
            **self._cursor.to_state(),
            "next_epoch": self.next_epoch,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "length": len(self.dataset),
            "order": self._orders.digest(self._cursor.epoch) if self._cursor.samples else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a cursor, of a checkpoint or a peer. The global batch size may be another.

        Raises:
            CorruptDataError: this is no loader's state, or a newer release's.
            ConfigurationError: the cursor is within an epoch whose order is another one here, so samples would be lost or seen twice.
        """
        if state.get("version") != _STATE_VERSION:
            raise CorruptDataError(
                f"loader {self._name!r}: the state has version {state.get('version')!r}; this release reads {_STATE_VERSION}"
            )
        cursor, next_epoch = Cursor.from_state(state), state.get("next_epoch")
        if type(next_epoch) is not int or next_epoch < 0:
            raise CorruptDataError(f"the loader's state has next_epoch={next_epoch!r}; expected a whole number of at least 0")
        if cursor.samples and not self._is_leased:
            self._check_order(cursor, state)
        self._cursor = cursor
        self._loaded_next_epoch = next_epoch
        self._dealt = None
        if self._leases is not None and self._leases.epoch != cursor.epoch:
            self._leases = None

    # ------------------------------------------------------------------------------------------------------- step by step

    def _epochs(self, n: int) -> Iterator[int]:
        try:
            epoch = self._clock().enter_epochs(self)
        except StopTraining:
            return
        self._stopped = False
        try:
            while epoch < n and not self._stopped:
                self._within = epoch
                self._clock().epoch_opens(self, epoch)
                yield epoch
                epoch = max(epoch + 1, self._cursor.epoch)
        finally:
            self._within = None

    def _iteration(self) -> Iterator[Step]:
        epoch = self._next_epoch if self._within is None else self._within
        before = self._cursor.global_step
        self._clock().loop_left(self)  # an older iterator that waits at a batch, if there is one
        self._fetch_failed = False
        over = False
        try:
            yield from self._epoch_steps(epoch)
            over = True
        except GeneratorExit:
            # Left early. After an error in the dataset the loop may be entered again, and goes on with the epoch.
            over = self._cursor.global_step > before and not self._fetch_failed
            if (clock := self._met()) is not None:
                clock.loop_left(self)
            raise
        finally:
            self._under_way = False
            if over:
                self._next_epoch = max(self._next_epoch, epoch + 1)
            self._fetcher.close()
            self._acknowledge()

    def _batches(self) -> Generator[Any, None, str | None]:
        nothing = True
        for step in self._iteration():
            nothing = False
            yield from step
        # What `next(iter(loader))` says when it raises StopIteration; a for loop never sees it.
        return _NOTHING_LEFT.format(self._name) if nothing else None

    def _epoch_steps(self, epoch: int) -> Iterator[Step]:
        if self._is_over(epoch):
            return
        self._under_way = True
        self._move_to(epoch)  # ahead of the border, where a joiner may be given this cursor
        took_part = False
        while not self._is_over(epoch):
            placement = self._begin()
            if placement is None:
                return
            if self._is_over(epoch):
                break
            self._move_to(epoch)
            took_part = True
            self._next_epoch, self._loaded_next_epoch = epoch, 0
            self._dealt = self._take_lease(placement) if self._is_leased else self._deal(placement)
            if self._dealt is not None:
                yield self._assigned(self._dealt)
        if took_part:
            self._end_epoch()

    def _is_over(self, epoch: int) -> bool:
        """The run is past this epoch, or has left it; or, in a joiner, the peers are somewhere else."""
        return epoch < self._loaded_next_epoch or epoch < self._cursor.epoch or self._clock().is_elsewhere(self, epoch)

    def _move_to(self, epoch: int) -> None:
        if self._cursor.epoch < epoch:
            self._cursor = self._cursor.at_epoch(epoch)

    def _begin(self) -> Placement | None:
        """The next border; None when this rank is to stop."""
        self._dealt = None
        self._stopped = False
        try:
            return self._clock().begin_step(self)
        except StopTraining:
            self._stopped = True
            return None

    def _end_epoch(self) -> None:
        try:
            self._clock().end_epoch(self)
        except StopTraining:
            self._stopped = True

    def _deal(self, placement: Placement) -> DealtStep | None:
        """This rank's part of the step at the cursor; None when the epoch is over: where a run with another batch size left the cursor,
        `drop_last` may leave out what remains."""
        dealt = self._dealer.deal(self._cursor, placement)
        if dealt is None:
            self._cursor = self._cursor.at_epoch(self._cursor.epoch + 1)
        return dealt

    def _take_lease(self, placement: Placement) -> DealtStep | None:
        """The next batch leased to this rank; None when there is none now, or the epoch is over."""
        epoch = self._cursor.epoch
        if self._leases is None or self._leases.epoch != epoch:
            batches = len(self._dealer.plan(epoch))
            self._leases = LeasedBatches(loader=self._name, epoch=epoch, batches_in_epoch=batches, ahead=1 + self._num_workers)
        number = self._leases.take(self._clock())
        if number is not None:
            return self._dealer.leased(epoch, number, placement)
        if self._leases.done:
            self._cursor = self._cursor.at_epoch(epoch + 1)
        return None

    def _assigned(self, dealt: DealtStep) -> Step:
        """The step for the user's loop. With micro-batches the session hears the share here, else with the batch, which may weigh it."""
        if self._micro_batch_size is not None:
            weighed = self._weight_fn is not None
            weight = math.nan if weighed else float(sum(map(len, dealt.blocks)))
            total = None if weighed else float(len(dealt.positions))
            most = len(self._dealer.plan(dealt.epoch).deal(dealt.positions, 0, dealt.placement.world_size))
            self._clock().assign(Share(weight=weight, total_weight=total, micro_batches=len(dealt.blocks), most_micro_batches=most))
        return Step(dealt, self._hand_out(dealt))

    def _hand_out(self, dealt: DealtStep) -> Iterator[Any]:
        clock = self._clock()
        for block in dealt.blocks:
            if self._dealt is not dealt:
                raise PreconditionError(f"step {dealt.number} of epoch {dealt.epoch} is over; its batches can no longer be taken")
            request = self._dealer.request(dealt, block)
            try:
                batch = self._fetcher.fetch(request, functools.partial(self._following, dealt, request))
            except Exception:
                self._fetch_failed = True
                raise
            weight = self._weight(batch, block)
            if self._micro_batch_size is None:
                clock.assign(Share(weight=weight, total_weight=self._total_weight(dealt, weight), micro_batches=None))
            clock.begin_micro_batch(index=block.index, weight=weight, key=request.key)
            self._note(dealt, block, request)
            dealt.handed_out += len(block)
            yield batch
            clock.end_micro_batch()
        if self._micro_batch_size is not None:
            clock.finish_batches()

    def _following(self, dealt: DealtStep, request: Request) -> Iterator[Request]:
        if self._leases is not None:
            return self._dealer.following_leases(dealt, self._leases.coming())
        return self._dealer.following(dealt, request)

    def _weight(self, batch: Any, block: Block) -> float:
        if self._weight_fn is None or not len(block):
            return float(len(block))
        weight = float(self._weight_fn(batch))
        if not math.isfinite(weight) or weight < 0:
            raise ConfigurationError(f"weight_fn gave {weight}; expected a finite number of at least 0")
        return weight

    def _total_weight(self, dealt: DealtStep, weight: float) -> float | None:
        if self._is_leased:
            return weight
        return None if self._weight_fn is not None else float(len(dealt.positions))

    # --------------------------------------------------------------------------------------------------------------- rest

    def _clock(self) -> StepClock:
        """The session; introduces itself to one that it meets for the first time."""
        clock = current_clock()
        if self._session is None or self._session() is not clock:
            if not self._name:
                _unnamed[clock] = _unnamed.get(clock, 0) + 1
                self._name = "loader" if _unnamed[clock] == 1 else f"loader-{_unnamed[clock]}"
            self._session = weakref.ref(clock)
            clock.register_source(self)
        return clock

    def _met(self) -> StepClock | None:
        """The session met last, if it is still there: an iteration may be left while the process ends."""
        return self._session() if self._session is not None else None

    def _acknowledge(self) -> None:
        """The loop is left: finished batches that no further lease would tell of."""
        clock = self._met()
        if clock is None or self._leases is None:
            return
        try:
            self._leases.acknowledge(clock)
        except ShoalError as error:
            _log.warning("loader %s: the last batches could not be acknowledged and will be dealt again: %s", self._name, error)

    def _check_order(self, cursor: Cursor, state: Mapping[str, Any]) -> None:
        here: dict[str, Any] = {"length": len(self.dataset), "order": self._orders.digest(cursor.epoch)}
        if not self._orders.drawn:
            here |= {"seed": self._seed, "shuffle": self._shuffle}
        for field, value in here.items():
            if state.get(field) != value:
                raise ConfigurationError(
                    f"loader {self._name!r}: the state is {cursor.samples} samples into epoch {cursor.epoch} of an order with "
                    f"{field}={state.get(field)!r}, but here it is {value!r}: samples would be lost or seen twice. "
                    "Use the same dataset, seed, shuffle and sampler, or a state saved between epochs"
                )

    def _note(self, dealt: DealtStep, block: Block, request: Request) -> None:
        if self._record is None:
            return
        plan = self._dealer.plan(dealt.epoch)
        self._record.write(
            "dealt",
            loader=self._name,
            generation=dealt.placement.generation,
            epoch=dealt.epoch,
            step=dealt.number,
            rank=dealt.placement.rank,
            index=block.index,
            begin=dealt.positions.start,
            first=block.positions.start,
            samples=list(request.indices) if len(block) else [],
            expected=plan.counted,
            dataset=len(self.dataset),
            drawn=self._orders.drawn,
        )

    def _refuse_evaluation(self, what: str) -> None:
        if self._evaluation is not None:
            raise ConfigurationError(f"{what} of a loader with train=False: it has no steps; iterate it, or give it to shoal.evaluate")
