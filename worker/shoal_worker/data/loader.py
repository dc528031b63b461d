"""The training loader that users create: its arguments, the interface through which the session
takes steps from it, and the ways to iterate over it.

The following modules do the work. All their state belongs to the thread of the user's training
loop:

- `cursor.py`: the cursor and the count of epochs.
- `step_batches.py`: this rank's part of the current step, as dealt by `sampling.py`, or its leased
  batches.
- `iteration.py`: the running loops, and the loader's name and session. It passes a step's batches,
  created by `fetch.py`, to the script's loop.

The cursor moves only when the session reports that a step is committed. Batches that were passed to
the loop but not committed are dealt again. The loader makes no membership decisions and does not
reduce gradients. None of its parts refers to the loader. When the script drops the loader, the
loader is therefore freed and its name becomes available.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

from shoal_common.errors import ConfigurationError, InternalError
from torch.utils.data import DataLoader, IterableDataset, default_collate

from shoal_worker.data.balance import Balance
from shoal_worker.data.cursor import LoaderProgress
from shoal_worker.data.fetch import Fetcher, Request
from shoal_worker.data.iteration import Delivery, Introduction, Iterations
from shoal_worker.data.record import SampleRecord
from shoal_worker.data.sampling import EpochOrders, EpochPlan
from shoal_worker.data.step_batches import Dealer, DealtSupply, LeasedSupply, Step, Supply
from shoal_worker.data.streaming.evaluation_batches import StreamedEvaluation
from shoal_worker.data.streaming.position_supply import PositionSupply
from shoal_worker.data.streaming.shard_supply import ShardSupply
from shoal_worker.data.streaming.sources import Sources
from shoal_worker.data.streaming.stream import (
    ShardedStream,
    check_stream,
    has_items,
    identity_of_stream,
    is_indexable,
    is_stream,
    makes_of,
    names_of,
)
from shoal_worker.data.streaming.supply import StreamOrders, StreamSupply
from shoal_worker.data.torch_loaders import arguments_of
from shoal_worker.elastic.contract.loader_interface import Placement
from shoal_worker.settings import WorkerSettings
from shoal_worker.state.digest import SAMPLES, identity_of

# ---------------------------------------------------------------------------- loaders without steps
#
# The batches of an evaluation loader: a fixed list of work items, which `evaluate` can deal to any
# rank. There are no steps, no cursor and no commits. Every sample is in exactly one batch, in the
# dataset's order or in the sampler's order, which is drawn once. A batch has a number and is the
# same on every rank.


class EvaluationBatches:
    """Numbered batches for evaluation. May be used by only one thread at a time."""

    def __init__(
        self, *, orders: EpochOrders, fetcher: Fetcher, size: int, seed: int, dealing: str
    ) -> None:
        """Creates the batches. `dealing`: values that determine the batches, as text; the same on
        all ranks."""
        self.dealing = dealing
        self._orders = orders
        self._fetcher = fetcher
        # a sampler may draw fewer or more indices than its length
        self._length = len(orders.order(0))
        self._size = size
        self._seed = seed

    def __len__(self) -> int:
        """Returns the number of batches."""
        return math.ceil(self._length / self._size)

    def __iter__(self) -> Iterator[Any]:
        """Iterates over all batches of the dataset, in order."""
        return (batch for _, batch in self.read(range(len(self))))

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """Yields (number, batch) for the given batch numbers, in order. Data workers, if any,
        create the batches ahead."""
        wanted = [(number, self._request(number)) for number in numbers]
        try:
            for place, (number, request) in enumerate(wanted):

                def ahead(place: int = place) -> Iterator[Request]:
                    return (later for _, later in wanted[place:])

                yield number, self._fetcher.fetch(request, ahead)
        finally:
            self._fetcher.close()

    def samples(self, number: int) -> int:
        """Returns the number of samples in a batch."""
        return min(self._size, self._length - number * self._size)

    def _request(self, number: int) -> Request:
        start = number * self._size
        positions = range(start, min(start + self._size, self._length))
        return Request(
            epoch=0,
            indices=tuple(self._orders.indices(0, positions)),
            key=(self._seed, 0, 0, start),
        )


# --------------------------------------------------------------------------------------- the loader


class ElasticDataLoader:
    """Deals a dataset or a stream to the ranks of an elastic job: each sample exactly once per
    epoch, in global batches of constant size.

    There are three forms. With `global_batch_size` alone, `for batch in loader` runs one step per
    iteration, and each rank gets its part of the global batch. With `micro_batch_size`, use `for
    step in loader.steps(): for batch in step`. With `batch_size` (async_sgd), complete batches are
    leased to workers, first come, first served. `train=False` creates a loader for `evaluate`;
    iterating over such a loader directly yields every batch on this rank.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        weight_fn: Callable[[Any], float] | None = None,
        name: str | None = None,
        train: bool = True,
        look_ahead: bool = False,
        balance: bool = False,
    ) -> None:
        """Args:
            dataset: dataset with `__len__` and `__getitem__` (optionally `__getitems__`, which
                takes a list of indices); or a stream, which is an `IterableDataset` or a
                `ShardedStream` (docs/streams.md). Every rank reads all items of an
                `IterableDataset`, but trains on only some of them.
            global_batch_size: number of samples in a step, in total over all ranks, regardless of
                their number.
            micro_batch_size: number of samples in a micro-batch; ranks are then dealt complete
                micro-batches.
            batch_size: number of samples in a leased batch (async_sgd). Exactly one of `batch_size`
                and `global_batch_size` is required.
            seed: seed of the order, and of the global random generators of torch, NumPy and Python.
                They are seeded again for each batch and step, so that datasets, models and the loop
                may draw from them. Must be the same on every rank.
            shuffle: True to use a new order in each epoch instead of the dataset's order. None:
                False for a stream, which has its own order, and True for other datasets. For a
                `ShardedStream`, True shuffles the shards. No effect with `sampler` or
                `train=False`.
            drop_last: True to omit the last step of an epoch if it is incomplete.
            sampler: draws the indices of each epoch, once per epoch, instead of `seed` and
                `shuffle`. It must draw the same indices on every rank. To ensure this, the loader
                calls the sampler's `set_epoch`, and seeds the sampler's own random generators and
                the global ones. If ranks have drawn different indices, the epoch's first step fails
                (RANKS_DIVERGED).
            collate_fn: function that combines a list of samples into a batch; None: torch's
                `default_collate`.
            num_workers: number of processes that create batches ahead; 0: batches are created in
                the loop. For a `ShardedStream`, these processes read this rank's shards ahead; for
                other streams, only one process is allowed. Batches of streams are always assembled
                in the loop.
            pin_memory: True to put batches in page-locked memory, if there is an accelerator.
            weight_fn: function that returns the weight of a batch in the mean over the step, for
                example its number of unmasked tokens; None: the weight is the number of samples.
            name: name that identifies the loader in checkpoints; must be the same on every rank and
                after a restart. None: loaders are numbered in order of construction.
            balance: True to deal micro-batches in proportion to the ranks' measured speeds
                (docs/guides/unequal-machines.md); False to deal every rank the same number. True
                requires `micro_batch_size`.
            look_ahead: with `batch_size`, True to lease one batch in advance, so that `peek` knows
                the next batch.
            train: False for an evaluation loader, which is not part of training steps. Its batches
                have `micro_batch_size` samples if given, otherwise `global_batch_size` or
                `batch_size`.

        Raises:
            ConfigurationError: invalid arguments, or a dataset that cannot be dealt.
        """
        check_kind(dataset)
        streams = is_stream(dataset)
        check_sizes(global_batch_size, micro_batch_size, batch_size, train=train)
        check_rest(seed=seed, num_workers=num_workers, name=name, drop_last=drop_last, train=train)
        if balance and (micro_batch_size is None or isinstance(dataset, ShardedStream)):
            raise ConfigurationError(
                "balance=True without micro_batch_size=: only whole micro-batches are dealt by "
                "speed; pass micro_batch_size= and loop over loader.steps()"
                if micro_batch_size is None
                else "balance=True with a ShardedStream: each rank reads whole shards, so its part "
                "of a step is fixed; leave balance out, or use a dataset with indices"
            )
        if streams:
            check_stream(
                dataset,
                batch_size=batch_size,
                micro_batch_size=micro_batch_size,
                shuffle=shuffle,
                sampler=sampler,
                num_workers=num_workers,
                train=train,
            )
        else:
            check_dataset(dataset)
        self.dataset = dataset
        size = global_batch_size or batch_size or 0
        shuffle = train and (not streams if shuffle is None else shuffle)
        self._micro_batch_size = micro_batch_size
        identity = identity_of_stream(dataset) if streams else identity_of(dataset)
        self._arguments = {
            "length of the dataset": None if streams else len(dataset),
            "batch size": size,
            "micro_batch_size": micro_batch_size,
            "seed": seed,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "weight_fn": weight_fn is not None,
            "balance": balance,
            SAMPLES: identity,
        }
        self._dealing: tuple[dict[str, Any], str] | None = None
        self._evaluation: EvaluationBatches | StreamedEvaluation | None = None
        self._record = _sample_record() if train else None
        self._balance = Balance(
            global_batch_size=size,
            micro_batch_size=None if isinstance(dataset, ShardedStream) else micro_batch_size,
            wanted=balance,
        )
        collate = collate_fn or default_collate
        # Training seeds the random generators for each batch, so the fetcher need not restore them.
        workers: dict[str, Any] = {
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "leaves_no_trace": not train,
        }
        sizes: dict[str, Any] = {
            "batch_size": size,
            "micro_batch_size": micro_batch_size,
            "drop_last": drop_last,
            "seed": seed,
        }
        self._supply: Supply
        if streams:
            sizes["num_workers"] = num_workers
            self._progress = LoaderProgress(StreamOrders(dataset, seed=seed, shuffle=shuffle))
            if isinstance(dataset, ShardedStream) and train:
                supply: StreamSupply = ShardSupply(
                    dataset, self._progress, shuffle=shuffle, **sizes
                )
            else:
                supply = PositionSupply(dataset, self._progress, balance=self._balance, **sizes)
            supply.plan(0)  # raises if the sizes do not fit one another
            self._supply = supply
            # Data workers read the items; the batches are assembled here.
            fetcher = Fetcher(supply.items, collate_fn=collate, **{**workers, "num_workers": 0})
            if not train:
                batch = micro_batch_size or size
                self._evaluation = StreamedEvaluation(
                    functools.partial(
                        Sources, makes_of(dataset), num_workers=num_workers, ahead=batch
                    ),
                    names_of(dataset),
                    collate_fn=collate,
                    size=batch,
                    seed=seed,
                    dealing=self.dealing,
                )
        else:
            orders = EpochOrders(
                dataset_length=len(dataset),
                identity=identity,
                seed=seed,
                shuffle=shuffle,
                sampler=sampler,
            )
            dealer = Dealer(orders, balance=self._balance, **sizes)
            self._progress = LoaderProgress(orders)
            _check_not_empty(dealer.announced_plan(0))
            fetcher = Fetcher(dataset, collate_fn=collate, **workers)
            self._supply = (
                LeasedSupply(dealer, self._progress, ahead=1 + num_workers + bool(look_ahead))
                if train and batch_size is not None
                else DealtSupply(dealer, self._progress)
            )
            if not train:
                batch = micro_batch_size or size
                self._evaluation = EvaluationBatches(
                    orders=orders, fetcher=fetcher, size=batch, seed=seed, dealing=self.dealing
                )
        in_micro_batches = micro_batch_size is not None
        self._delivery = Delivery(
            self._supply,
            fetcher,
            in_micro_batches=in_micro_batches,
            weight_fn=weight_fn,
            record=self._record,
            balance=self._balance,
            seed=seed,
        )
        self._introduction = Introduction(name or ("" if train else "evaluation"))
        self._iterations = Iterations(
            self._introduction, self._progress, self._supply, self._delivery, fetcher
        )
        if train:
            self._introduction.session(self)

    @classmethod
    def from_dataloader(
        cls,
        loader: Any,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        seed: int | None = None,
        weight_fn: Callable[[Any], float] | None = None,
        name: str | None = None,
        train: bool = True,
    ) -> ElasticDataLoader:
        """Creates a loader from a torch DataLoader (or torchdata's `StatefulDataLoader`) with the
        same dataset, sampler or shuffling, batch size, `collate_fn`, `num_workers`, `pin_memory`
        and `drop_last`.

        The order differs from the one that torch's generator would draw. `prefetch_factor`,
        `persistent_workers`, `in_order`, `timeout` and `pin_memory_device` have no effect on the
        batches and are ignored.

        Args:
            loader: the DataLoader, as written for one process.
            global_batch_size: number of samples in a step, in total over all ranks; None: the
                DataLoader's `batch_size`.
            micro_batch_size: number of samples in a micro-batch; see `ElasticDataLoader`.
            seed: seed of the order; None: the seed of the DataLoader's `generator`, or 0 if there
                is no generator or the DataLoader's sampler is used.
            weight_fn: function that returns a batch's weight in the mean over the step.
            name: name that identifies the loader in checkpoints.
            train: False for an evaluation loader.

        Raises:
            ConfigurationError: the DataLoader has a batch_sampler other than torch's
                `BatchSampler`, a DistributedSampler, a worker_init_fn, a `multiprocessing_context`
                that differs from the process's default, or an `__iter__` of its own. Or its
                arguments are invalid for an `ElasticDataLoader`.
        """
        arguments = arguments_of(loader, "from_dataloader")
        if global_batch_size is not None:
            arguments["global_batch_size"] = global_batch_size
        if seed is not None:
            arguments["seed"] = seed
        return cls(
            **arguments,
            micro_batch_size=micro_batch_size,
            weight_fn=weight_fn,
            name=name,
            train=train,
        )

    @property
    def name(self) -> str:
        """Name of the loader, unique among the training loaders of a session and stable across
        restarts."""
        return self._introduction.name

    @property
    def dealing(self) -> str:
        """Implements `StepSource.dealing`."""
        dealt = self._supply.dealing(self.epoch)
        if self._dealing is None or self._dealing[0] is not dealt:
            self._dealing = dealt, json.dumps({**self._arguments, **dealt})
        return self._dealing[1]

    @property
    def epoch(self) -> int:
        """The cursor's epoch, counted from 0."""
        return self._progress.cursor.epoch

    @property
    def step(self) -> int:
        """Number of committed steps in the cursor's epoch."""
        return self._progress.cursor.step

    @property
    def next_epoch(self) -> int:
        """Implements `StepSource.next_epoch`."""
        return self._progress.next_epoch

    @property
    def within(self) -> int | None:
        """Implements `StepSource.within`."""
        return self._progress.within

    @property
    def gives_up(self) -> int | None:
        """Implements `StepSource.gives_up`."""
        return self._progress.gives_up

    @property
    def repeats(self) -> int | None:
        """Implements `StepSource.repeats`."""
        return self._progress.repeats

    @property
    def next_iteration(self) -> int:
        """Implements `StepSource.next_iteration`."""
        return self._progress.passed_iterations

    @property
    def ends_epoch(self) -> bool:
        """Implements `StepSource.ends_epoch`."""
        return self._supply.ends_epoch or self._progress.takes_last_step

    @property
    def under_way(self) -> bool:
        """Implements `StepSource.under_way`."""
        return self._iterations.under_way

    @property
    def is_over(self) -> bool:
        """Implements `StepSource.is_over`."""
        return self._iterations.is_over

    @property
    def step_samples(self) -> int:
        """Implements `StepSource.step_samples`."""
        dealt = self._supply.current
        if dealt is None:
            return 0
        return dealt.handed_out if self.leased else len(dealt.positions)

    def steps_until(self, epoch: int) -> int | None:
        """Implements `StepSource.steps_until`."""
        return self._supply.steps_until(epoch)

    def count_from(self, epoch: int | None) -> None:
        """Implements `StepSource.count_from`."""
        self._progress.count_from(epoch)

    @property
    def global_step(self) -> int:
        """Number of steps committed so far, over all epochs. Use this number to do something every
        k steps, because it is the same on all ranks, including ranks that joined later. With
        `batch_size`, counts only this rank's steps."""
        return self._progress.cursor.global_step

    @property
    def plan(self) -> EpochPlan:
        """Division of the cursor's epoch into steps. If a stream's end is not known yet, the plan
        describes an infinite epoch."""
        return self._supply.plan(self._progress.cursor.epoch)

    def __len__(self) -> int:
        """Returns the number of steps in a complete epoch, which does not depend on the number of
        ranks. With `batch_size`, returns the number of batches over all ranks. For an evaluation
        loader, returns the number of its batches.

        Raises:
            TypeError: the loader reads a stream, which has no known length.
        """
        if isinstance(self._supply, StreamSupply):
            raise TypeError(
                f"a loader of a stream ({type(self.dataset).__qualname__}) has no length, because "
                "the number of items is known only at the end"
            )
        return (
            len(self.plan)
            if not isinstance(self._evaluation, EvaluationBatches)
            else len(self._evaluation)
        )

    # ------------------------------------------------------------------------ for the training loop

    def epochs(self, n: int | None = None, *, max_steps: int | None = None) -> Iterator[int]:
        """Yields epoch numbers up to `n` - 1, or until the run has committed `max_steps` steps.
        Begins with the run's current epoch, which may be greater than 0 after a resume or in a
        joiner. Examples: `for epoch in loader.epochs(90)`, or `for epoch in
        loader.epochs(max_steps=10_000)`.

        Ends early when the job is stopped.

        Args:
            n: number of epochs. None: no limit.
            max_steps: value of `global_step` at which the loop ends, possibly in the middle of an
                epoch. A resumed run with a larger value continues in that epoch. Steps before a
                resume count; aborted steps do not. With `batch_size`, counts the batches of all
                ranks. With both arguments, the loop ends at the first limit that is reached.

        Raises:
            ConfigurationError: neither argument is given, an argument is not an integer, or this is
                an evaluation loader.
        """
        self._refuse_evaluation("epochs()")
        if n is None and max_steps is None:
            raise ConfigurationError(
                "epochs(): expected a number of epochs, or max_steps=, or both"
            )
        for shown, value in (("", n), ("max_steps=", max_steps)):
            if value is not None and not isinstance(value, SupportsIndex):
                raise ConfigurationError(f"epochs({shown}{value!r}): expected a whole number")
        return self._iterations.epochs(self, sys.maxsize if n is None else n, max_steps)

    def __iter__(self) -> Iterator[Any]:
        """Iterates over this rank's batches, one per step. An evaluation loader iterates over every
        batch.

        A loop may begin in the middle of an epoch (after a resume, or in a joiner). After an
        aborted step, its samples are dealt again. `enumerate` therefore counts this process's
        iterations, not the run's steps; use `global_step` to count steps.

        Raises:
            ConfigurationError: the loader has micro-batches; iterate over `steps()` instead.
        """
        if self._evaluation is not None:
            return iter(self._evaluation)
        if self._micro_batch_size is not None:
            raise ConfigurationError(
                f"micro_batch_size={self._micro_batch_size} is set, so a step consists of several "
                "batches, or of none on some ranks: write `for step in loader.steps():` and "
                "inside it `for batch in step:`, with optimizer.step() after the inner loop"
            )
        return self._iterations.batches(self)

    def steps(self) -> Iterator[Step]:
        """Yields one `Step` per global batch. Iterate over each step to get this rank's batches."""
        self._refuse_evaluation("steps()")
        return self._iterations.steps(self)

    @property
    def batch_weight(self) -> float:
        """Weight of the last batch that this rank received, in the mean over the batch's step: its
        number of samples, or the result of `weight_fn`.

        In a step with fewer samples than ranks, a rank without samples gets a copy of another
        rank's samples as a stand-in, whose weight is 0. Sums over batches should therefore multiply
        by this weight, as in `total += loss.detach() * loader.batch_weight`, not by the length of
        the batch.
        """
        self._refuse_evaluation("batch_weight")
        return self._delivery.batch_weight

    def peek(self) -> Any:
        """Returns the batch that this rank will probably get next, so that the script can prepare
        for it (for example with `table.prefetch(...)`). Must be called inside the loop. Returns
        None if the epoch has no further batch, or the next batch is not known (with `batch_size`,
        unless the loader has `look_ahead` or data workers). The batch is created in this process;
        data workers, if any, create it again for training."""
        self._refuse_evaluation("peek()")
        return self._delivery.peek()

    def evaluation_batches(self) -> EvaluationBatches | StreamedEvaluation:
        """Returns the numbered batches of an evaluation loader, which `evaluate` deals to the
        ranks.

        Raises:
            ConfigurationError: this is a training loader.
        """
        if self._evaluation is None:
            raise ConfigurationError(
                f"loader {self.name!r} is a training loader, and evaluating with it would move "
                "its cursor; create one with train=False"
            )
        return (
            self._evaluation.anew()
            if isinstance(self._evaluation, StreamedEvaluation)
            else self._evaluation
        )

    # ------------------------------------------------------------------------------ for the session

    @property
    def leased(self) -> bool:
        """Implements `StepSource.leased`."""
        return self._supply.leased

    def leaving(self) -> None:
        """Implements `StepSource.leaving`."""
        self._iterations.acknowledge()

    def committed(
        self,
        placement: Placement,
        *,
        known: bool = False,
        pushed: Sequence[int] | None = None,
        summed: Sequence[float] | None = None,
    ) -> int:
        """Implements `StepSource.committed`."""
        dealt = self._supply.commit()
        if dealt is None:
            raise InternalError(
                f"loader {self.name!r} received a commit, but none of its steps is in progress"
            )
        if self._record is not None:
            place = {"loader": self.name, "generation": placement.generation, "epoch": dealt.epoch}
            if self.leased:
                for number in (dealt.number,) if pushed is None else pushed:
                    self._record.write("finished", **place, step=number, known=known)
            else:
                self._record.write(
                    "committed", **place, step=dealt.number, begin=dealt.positions.start
                )
        if summed:
            self._balance.round_ended(summed, dealt, self.name)
        return dealt.handed_out if placement.leads_replica else 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the cursor after the last commit, in samples, and the values that determine the
        order of the samples. JSON-able."""
        return self.cursor_reader()()

    def cursor_reader(self) -> Callable[[], dict[str, Any]]:
        """Implements `StepSource.cursor_reader`."""
        return functools.partial(_read_cursor, self._progress, self._supply)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a cursor from a checkpoint or a peer. The global batch size may differ.

        Raises:
            CorruptDataError: `state` is not a loader's state, or is from a newer release.
            ConfigurationError: the cursor is in the middle of an epoch whose order is different in
                this loader, so samples would be lost or seen twice.
        """
        checked = self._progress.checked(state, loader=self.name, leased=self.leased)
        self._supply.load(state, loader=self.name)
        self._progress.take(checked)
        self._supply.reset()

    def _refuse_evaluation(self, what: str) -> None:
        if self._evaluation is not None:
            raise ConfigurationError(
                f"{what} of a loader with train=False: such a loader has no steps; iterate over "
                "it, or pass it to shoal.evaluate"
            )


def _read_cursor(progress: LoaderProgress, supply: Supply) -> dict[str, Any]:
    return {**progress.capture(), **supply.capture()}


def _sample_record() -> SampleRecord | None:
    """Returns the sample record if this process is configured to write one, otherwise None."""
    settings = WorkerSettings.load()
    return (
        SampleRecord(settings.record_dir, settings.member_id)
        if settings.record_dir is not None
        else None
    )


def check_kind(dataset: Any) -> None:
    """Raises ConfigurationError if the items of `dataset` are batches, or if its length is
    ambiguous."""
    kind = type(dataset).__qualname__
    if isinstance(dataset, DataLoader):
        raise ConfigurationError(
            f"dataset={kind} is a DataLoader, whose batches Shoal cannot divide between ranks; "
            "call shoal.ElasticDataLoader.from_dataloader(loader), or pass the dataset itself"
        )
    if isinstance(dataset, IterableDataset) and is_indexable(dataset):
        raise ConfigurationError(
            f"dataset={kind} is an IterableDataset that also has a length and items by index. "
            "Such datasets (the StreamingDataset of MosaicML and of litData) divide themselves by "
            "rank, so their length may count one rank's part only, and the other samples would be "
            "lost. To deal samples by index, pass torch.utils.data.Subset(dataset, range(n)) with "
            "the number n of all samples (docs/guides/data-sources.md)"
        )


def check_dataset(dataset: Any) -> None:
    """Raises ConfigurationError unless `dataset` has samples that can be accessed by index."""
    kind = type(dataset)
    indexable = has_items(dataset)
    if not indexable or not hasattr(kind, "__len__"):
        missing = " and ".join(
            name
            for name, there in (("__getitem__", indexable), ("__len__", hasattr(kind, "__len__")))
            if not there
        )
        raise ConfigurationError(
            f"dataset={kind.__qualname__} has no {missing}, and is not a stream; implement "
            "__len__ and __getitem__(index), or __iter__"
        )
    if len(dataset) == 0:
        raise ConfigurationError(
            f"dataset={kind.__qualname__} is empty; expected at least one sample"
        )


def _check_not_empty(plan: EpochPlan) -> None:
    if plan.length == 0:
        raise ConfigurationError("the sampler draws no sample; expected at least one per epoch")
    if len(plan) == 0:
        raise ConfigurationError(
            f"drop_last=True leaves no step: the dataset has {plan.length} samples, but a batch "
            f"needs {plan.global_batch_size}; use a smaller batch, or keep the last one"
        )


def check_sizes(
    global_batch_size: int | None,
    micro_batch_size: int | None,
    batch_size: int | None,
    *,
    train: bool,
) -> None:
    """Raises ConfigurationError unless the sizes select exactly one form of the loader."""
    sizes = {
        "global_batch_size": global_batch_size,
        "micro_batch_size": micro_batch_size,
        "batch_size": batch_size,
    }
    for name, size in sizes.items():
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigurationError(f"{name}={size!r}: expected a positive integer")
    if (global_batch_size is None) == (batch_size is None):
        given = "both" if batch_size is not None else "neither"
        raise ConfigurationError(
            "expected either global_batch_size= (samples per step over all ranks, for "
            "synchronous strategies) or batch_size= (samples per batch of one rank, for "
            f"async_sgd); got {given}"
        )
    if batch_size is not None and micro_batch_size is not None and train:
        raise ConfigurationError(
            f"micro_batch_size={micro_batch_size} with batch_size={batch_size}: leased batches "
            "are not divided further; leave micro_batch_size out, or use global_batch_size"
        )


def check_rest(
    *, seed: int, num_workers: int, name: str | None, drop_last: bool, train: bool
) -> None:
    """Raises ConfigurationError for an invalid argument that can be checked independently of the
    others."""
    if type(seed) is not int:
        raise ConfigurationError(f"seed={seed!r}: expected a whole number, the same on every rank")
    if type(num_workers) is not int or num_workers < 0:
        raise ConfigurationError(f"num_workers={num_workers!r}: expected a non-negative integer")
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigurationError(f"name={name!r}: expected a non-empty string, or None")
    if drop_last and not train:
        raise ConfigurationError(
            "drop_last=True with train=False: an evaluation uses every sample once; leave "
            "drop_last out"
        )
