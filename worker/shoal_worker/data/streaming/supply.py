"""Common code of the two ways to deal a stream: by position, where every rank reads the entire
stream (`position_supply.py`), and by shards, where each rank reads its own shards
(`shard_supply.py`).

A source's reader, in this process or in a data worker, keeps items until the step that contains
them is committed. What a supply adds to the loader's state is the marks at the committed positions
of its sources.
"""

from __future__ import annotations

import abc
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from shoal_common.errors import ConfigurationError, PreconditionError
from typing_extensions import override

from shoal_worker.data.cursor import LoaderProgress
from shoal_worker.data.fetch import Request
from shoal_worker.data.sampling import Block, EpochPlan
from shoal_worker.data.step_batches import DealtStep, Supply
from shoal_worker.data.streaming.fingerprints import Probe, distinguishes
from shoal_worker.data.streaming.sources import Sources
from shoal_worker.data.streaming.stream import identity_of_stream, makes_of, names_of
from shoal_worker.elastic.contract.loader_interface import LoaderSession

_log = logging.getLogger(__name__)

STATE: Final = "stream"
"""Key of a stream's part of its loader's state."""
NO_END: Final = sys.maxsize
"""Length of an epoch whose end is not known."""


class StreamOrders:
    """Implements `Orders` for a stream: the source determines the order of the items."""

    drawn = False

    def __init__(self, stream: Any, *, seed: int, shuffle: bool) -> None:
        self.identity = identity_of_stream(stream)
        self.arguments = {"seed": seed, "shuffle": shuffle, "length": None}

    def digest(self, epoch: int) -> None:
        """Returns None, because no sampler draws the order."""


class StreamSupply(Supply):
    """Common code of the two ways to deal a stream. The `Fetcher` uses `items` as its dataset, with
    positions in the epoch as indices."""

    def __init__(
        self,
        stream: Any,
        progress: LoaderProgress,
        *,
        batch_size: int,
        micro_batch_size: int | None,
        drop_last: bool,
        seed: int,
        num_workers: int,
    ) -> None:
        super().__init__(progress)
        self._stream = stream
        self._sources = Sources(makes_of(stream), num_workers=num_workers, ahead=batch_size)
        self._names = names_of(stream)
        self._batch_size = batch_size
        self._micro_batch_size = micro_batch_size
        self._drop_last = drop_last
        self._seed = seed

    @property
    def items(self) -> Sequence[Any]:
        """Available items, by position in the epoch."""
        return _Items(self)

    @abc.abstractmethod
    def items_at(self, positions: Sequence[int]) -> list[Any]:
        """Returns the items at these positions of the current step."""

    @abc.abstractmethod
    def _close_readers(self) -> None:
        """Closes all readers. Their items are read again when needed."""

    @override
    def _steps_until(self, epoch: int) -> int | None:
        return None

    def rest(self) -> None:
        """Implements `Supply.rest`. Sources that this process reads remain open, in case the loop
        continues."""
        if self._sources.has_workers:
            self._close_readers()
            self._sources.close()

    @override
    def request(self, dealt: DealtStep, block: Block) -> Request:
        positions = block.positions or dealt.positions[: dealt.placement.least_samples]
        return Request(
            epoch=dealt.epoch,
            indices=tuple(positions),
            key=(self._seed, dealt.epoch, dealt.number, block.index),
        )

    def following(self, dealt: DealtStep, request: Request) -> Iterator[Request]:
        """Implements `Supply.following`. The next step's items are not read before that step
        begins."""
        requests = [self.request(dealt, block) for block in dealt.blocks]
        return iter(requests[requests.index(request) :])

    @override
    def upcoming(self, dealt: DealtStep, request: Request) -> Request | None:
        following = self.following(dealt, request)
        next(following)
        return next(following, None)

    def _plan(self, end: int | None) -> EpochPlan:
        return EpochPlan(
            length=NO_END if end is None else end,
            global_batch_size=self._batch_size,
            micro_batch_size=self._micro_batch_size,
            drop_last=self._drop_last,
        )

    def _check_not_empty(self, end: int, loader: str) -> None:
        """Raises ConfigurationError if an epoch of `end` items has no steps."""
        if self._progress.cursor.samples == 0 and not self._plan(end).step(0):
            raise ConfigurationError(
                f"loader {loader!r}: the stream yielded {end} items in epoch "
                f"{self._progress.cursor.epoch}, too few for a step of {self._batch_size} with "
                f"drop_last={self._drop_last}; expected at least one step. If the stream can be "
                "iterated only once, make its __iter__ start over"
            )


class _Items(Sequence[Any]):
    def __init__(self, supply: StreamSupply) -> None:
        self._supply = supply

    def __len__(self) -> int:
        return NO_END

    def __getitem__(self, position: Any) -> Any:
        return self._supply.items_at([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        return self._supply.items_at(positions)


def left_behind() -> PreconditionError:
    """Returns the error for a loop that requests a batch of a step after the step's readers have
    been closed."""
    return PreconditionError(
        "this step's batches are no longer available: the loop over steps() that yielded it has "
        "ended, and its data workers with it; use the batches inside the loop, or leave "
        "num_workers out"
    )


def compare_first(item: Any, session: LoaderSession, loader: str) -> None:
    """Compares the floating-point numbers of one item across all ranks, because fingerprints
    exclude these numbers. Must be called on all ranks, once per epoch, in the epoch's first step.
    Logs a warning if the numbers differ between ranks and the item contains nothing else that a
    fingerprint covers. In that case, either the source splits its items by rank, or it merely
    augments them at random."""
    summed = session.sum_numbers(Probe.of(item), or_own=True)
    if summed is not None and not Probe.alike(summed) and not distinguishes(item):
        _log.warning(
            "loader %r: the first item of this epoch's stream differs in its numbers between "
            "ranks. This is harmless if the stream augments items at random. Otherwise samples "
            "count twice or not at all: every rank must read the whole stream, in the same "
            "order, because Shoal deals the items. Do not split it by rank or worker "
            "(split_dataset_by_node, split_by_node), and seed its shuffling in set_epoch(epoch). "
            "Add a key or an index to each item to let Shoal tell the two cases apart",
            loader,
        )


def set_epoch_of(stream: Any, epoch: int) -> None:
    """Passes the epoch to the stream's `set_epoch`, if it has one."""
    set_epoch = getattr(stream, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def part_of_stream(state: Mapping[str, Any], loader: str) -> Mapping[str, Any]:
    """Returns the part of a loader's state that the supply of a stream has saved. Raises
    ConfigurationError if the state comes from a loader of a dataset that is accessed by index."""
    of_stream = state.get(STATE)
    if not isinstance(of_stream, Mapping):
        raise ConfigurationError(
            f"loader {loader!r}: the state is {state.get('samples')} samples into epoch "
            f"{state.get('epoch')} of an indexed dataset, but this dataset is a stream; use the "
            "same dataset, or a state saved between epochs"
        )
    return of_stream
