"""Determines a step's samples and their distribution across ranks: arithmetic on positions, and the
order of samples in each epoch.

An epoch is a fixed order of samples. A *position* is a place in that order. A step consists of the
next `global_batch_size` positions after the cursor. It is divided into blocks, one per rank or one
per micro-batch, which are dealt to the current ranks. A step's samples therefore depend only on the
cursor, and every position is dealt exactly once, even if the world size changes.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from shoal_common.errors import ConfigurationError
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from shoal_worker.data.balance import divided
from shoal_worker.data.fetch import seeded

# ----------------------------------------------------------------- positions: which rank gets which

Order = range | npt.NDArray[np.int64]
"""Dataset indices of an epoch, by position."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Adjacent positions whose samples one rank processes together: a micro-batch, or the rank's
    part of a plain step."""

    index: int
    """Index of the block within the step, counted from 0. Equal to the rank in a step without
    micro-batches."""
    positions: range

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """Division of an epoch's positions into steps and blocks."""

    length: int
    """Number of samples in the epoch."""
    global_batch_size: int
    """Number of samples in a step."""
    micro_batch_size: int | None = None
    """Number of samples in a micro-batch; None: in each step, every rank has one plain batch."""
    drop_last: bool = False
    """True to omit a last step of fewer than `global_batch_size` samples."""

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise ConfigurationError(
                f"global_batch_size={self.global_batch_size}: expected at least 1"
            )
        if (
            self.micro_batch_size is not None
            and not 1 <= self.micro_batch_size <= self.global_batch_size
        ):
            raise ConfigurationError(
                f"micro_batch_size={self.micro_batch_size}: expected 1 to "
                f"global_batch_size={self.global_batch_size}; a step consists of one or more "
                "micro-batches"
            )

    def __len__(self) -> int:
        """Returns the number of steps in a complete epoch."""
        whole, rest = divmod(self.length, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def counted(self) -> int:
        """Number of samples in a complete epoch: `length` without the samples omitted by
        `drop_last`."""
        return min(self.length, len(self) * self.global_batch_size)

    def step(self, cursor: int) -> range:
        """Returns the positions of the step that begins at `cursor`; empty if the epoch has no
        further step."""
        stop = min(cursor + self.global_batch_size, self.length)
        if self.drop_last and stop - cursor < self.global_batch_size:
            return range(cursor, cursor)
        return range(cursor, max(cursor, stop))

    def deal(
        self,
        step: range,
        rank: int,
        world_size: int,
        least: int = 1,
        costs: tuple[float, ...] | None = None,
    ) -> tuple[Block, ...]:
        """Returns the blocks of `rank` among `world_size` in a step.

        In a step without micro-batches, each rank gets one contiguous part, possibly empty, and
        parts differ by at most one sample. If the step is incomplete, each part has either at least
        `least` samples or none, and the ranks without samples are the highest ones. (This does not
        apply if even a complete step has fewer than `least` samples per rank.) With micro-batches,
        each rank gets adjacent micro-batches, possibly none, and their numbers differ by at most
        one. Lower ranks get the larger parts. `costs`: each rank's seconds per micro-batch; if
        given, each rank's number of micro-batches depends on its speed (`balance.divided`)."""
        if not 0 <= rank < world_size:
            raise ConfigurationError(
                f"rank={rank}: expected 0 to {world_size - 1} with world_size={world_size}"
            )
        if self.micro_batch_size is None:
            parts = world_size
            if least * world_size > len(step) < self.global_batch_size >= least * world_size:
                parts = max(1, len(step) // least)
            mine = part_of(len(step), rank, parts) if rank < parts else slice(len(step), len(step))
            return (Block(index=rank, positions=step[mine]),)
        starts = range(0, len(step), self.micro_batch_size)
        if costs is None:
            runs = range(len(starts))[part_of(len(starts), rank, world_size)]
        else:
            counts = divided(len(starts), costs)
            runs = range(sum(counts[:rank]), sum(counts[: rank + 1]))
        return tuple(
            Block(index=i, positions=step[starts[i] : starts[i] + self.micro_batch_size])
            for i in runs
        )

    def most_blocks(
        self, step: range, world_size: int, costs: tuple[float, ...] | None = None
    ) -> int:
        """Returns the largest number of blocks that any rank gets from `deal` in a step."""
        if self.micro_batch_size is None:
            return 1
        blocks = -(-len(step) // self.micro_batch_size)
        return -(-blocks // world_size) if costs is None else max(divided(blocks, costs))


def part_of(items: int, rank: int, world_size: int) -> slice:
    """Splits `items` into `world_size` contiguous parts and returns part `rank`. The first `items %
    world_size` parts have one more item than the others."""
    each, more = divmod(items, world_size)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


# ------------------------------------------------------------ orders: which sample is at a position
#
# The order of the samples in each epoch: `permutation`, or the indices drawn by a user's sampler.
# Each process iterates over the sampler once per epoch. Every rank must draw the same indices,
# including a joiner, which has not drawn the earlier epochs. The sampler's `set_epoch` is therefore
# called if it exists, and its own random generators (torch's, NumPy's and Python's) and the global
# ones are seeded before it draws. A sampler may still draw different indices, because it uses the
# rank or a random generator from elsewhere. To detect this, ranks compare a digest of the indices
# in every step. The digest is also part of the loader's state.


def permutation(seed: int, epoch: int, length: int, shuffle: bool) -> Order:
    """Returns the order of an epoch: `length` dataset indices.

    The arguments determine the order completely: the indices are sorted (stably) by the raw 64-bit
    outputs of Philox4x64-10 with key (seed, epoch) and counter 0. NumPy keeps these raw outputs
    stable across releases, unlike `Generator.permutation`. `seed` is taken modulo 2^64.
    """
    if not shuffle:
        return range(length)
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(length), kind="stable").astype(
        np.int64, copy=False
    )


class EpochOrders:
    """Provides the order of samples in each epoch. Caches the order that was requested last."""

    def __init__(
        self,
        *,
        dataset_length: int,
        identity: str,
        seed: int,
        shuffle: bool,
        sampler: Iterable[int] | None,
    ) -> None:
        """`identity`: digest that identifies the dataset."""
        if isinstance(sampler, DistributedSampler):
            raise ConfigurationError(
                "sampler=DistributedSampler(...): the loader already deals samples to the ranks; "
                "leave sampler out, or pass one that draws from the whole dataset"
            )
        if isinstance(sampler, BatchSampler):
            raise ConfigurationError(
                "sampler=BatchSampler(...): the loader forms batches itself; pass a sampler that "
                "draws single indices"
            )
        self.dataset_length = dataset_length
        self.identity = identity
        self._seed = seed
        self._shuffle = shuffle
        self._sampler = sampler
        self._held: tuple[int, Order] | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Values that, together with the epoch number, determine the order unless a sampler draws
        it. JSON-able."""
        return {"seed": self._seed, "shuffle": self._shuffle, "length": self.dataset_length}

    @property
    def drawn(self) -> bool:
        """True if a sampler determines the order. Indices may then occur several times or not at
        all."""
        return self._sampler is not None

    def length(self, epoch: int) -> int:
        """Returns the number of samples in an epoch. If there is a sampler that has no length,
        draws the epoch's order."""
        if self._sampler is None:
            return self.dataset_length
        length = getattr(self._sampler, "__len__", None)
        return length() if length is not None else len(self.order(epoch))

    def order(self, epoch: int) -> Order:
        """Returns the dataset index at each position of an epoch.

        Raises:
            ConfigurationError: the sampler has drawn something other than indices of the dataset.
        """
        if self._held is None or self._held[0] != epoch:
            if self._sampler is None:
                order = permutation(self._seed, epoch, self.dataset_length, self._shuffle)
            else:
                order = self._draw(self._sampler, epoch)
            self._held = epoch, order
        return self._held[1]

    def indices(self, epoch: int, positions: range) -> list[int]:
        """Returns the dataset indices at consecutive positions of an epoch."""
        part = self.order(epoch)[positions.start : positions.stop]
        return list(part) if isinstance(part, range) else part.tolist()

    def digest(self, epoch: int) -> str | None:
        """Returns the digest of an order drawn by a sampler. Returns None if the loader's arguments
        determine the order."""
        if self._sampler is None:
            return None
        return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(self.order(epoch)).data)

    def _draw(self, sampler: Iterable[int], epoch: int) -> Order:
        key = (self._seed, epoch)
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        with seeded(key):
            for generator in _generators_of(sampler):
                _seed(generator, int(torch.empty((), dtype=torch.int64).random_()))
            drawn = list(sampler)
        try:
            order = np.fromiter(
                (operator.index(index) for index in drawn), dtype=np.int64, count=len(drawn)
            )
        except (TypeError, OverflowError) as error:
            raise ConfigurationError(
                f"sampler={sampler!r} drew a value that is not an index of the dataset ({error}); "
                "expected whole numbers"
            ) from error
        if len(order) and not (order.min() >= 0 and order.max() < self.dataset_length):
            raise ConfigurationError(
                f"sampler={sampler!r} drew indices from {order.min()} to {order.max()}; "
                f"expected 0 to {self.dataset_length - 1} for a dataset of {self.dataset_length}"
            )
        return order


def _generators_of(sampler: object) -> Iterator[object]:
    """Yields the random generators of a sampler and of the samplers within it. The attribute
    `generator`, which torch's samplers have, comes first."""
    held = {"generator": getattr(sampler, "generator", None), **getattr(sampler, "__dict__", {})}
    for each in held.values():
        if isinstance(
            each, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
        ):
            yield each
        elif isinstance(each, Sampler):
            yield from _generators_of(each)


def _seed(generator: object, seed: int) -> None:
    match generator:
        case torch.Generator():
            generator.manual_seed(seed)
        case np.random.Generator():
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        case np.random.RandomState():
            generator.seed(seed % 2**32)
        case random.Random():
            generator.seed(seed)
