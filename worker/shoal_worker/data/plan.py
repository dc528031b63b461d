"""Which samples a step consists of, and which rank gets them. Pure: no torch, no clock, no state.

An epoch is a fixed order of samples. A *position* is a place in that order. A step is the next `global_batch_size` positions after the
cursor; it is cut into blocks, one per rank or one per micro-batch, and blocks are dealt to whatever ranks there are. So a step's samples
depend on the cursor alone, and every position is dealt once for any sequence of world sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from shoal_common.errors import ConfigurationError

Order = range | npt.NDArray[np.int64]
"""Dataset indices of an epoch, by position."""


def permutation(seed: int, epoch: int, length: int, shuffle: bool) -> Order:
    """The order of an epoch: `length` dataset indices.

    Fixed for ever by its arguments: the indices sorted (stably) by the raw 64-bit outputs of Philox4x64-10 with key (seed, epoch) and
    counter 0. It is built on raw outputs because numpy keeps those stable over releases, but not `Generator.permutation`. `seed` counts
    modulo 2^64.
    """
    if not shuffle:
        return range(length)
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(length), kind="stable").astype(np.int64, copy=False)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Neighbouring positions that one rank handles at once: a micro-batch, or its part of a plain step."""

    index: int
    """0-based over the whole step; the rank in a plain step."""
    positions: range

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """How the positions of one epoch become steps and blocks."""

    length: int
    """Samples in the epoch."""
    global_batch_size: int
    """Samples in a step."""
    micro_batch_size: int | None = None
    """Samples in a micro-batch; None: a step is one plain batch per rank."""
    drop_last: bool = False
    """Whether a last step of fewer than `global_batch_size` samples is left out."""

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise ConfigurationError(f"global_batch_size={self.global_batch_size}: expected at least 1")
        if self.micro_batch_size is not None and not 1 <= self.micro_batch_size <= self.global_batch_size:
            raise ConfigurationError(
                f"micro_batch_size={self.micro_batch_size}: expected 1 to global_batch_size={self.global_batch_size}; "
                "a step is made of one or more micro-batches"
            )

    def __len__(self) -> int:
        """Steps in a whole epoch."""
        whole, rest = divmod(self.length, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def counted(self) -> int:
        """Samples that a whole epoch deals: `length` less those that `drop_last` leaves out."""
        return min(self.length, len(self) * self.global_batch_size)

    def step(self, cursor: int) -> range:
        """The positions of the step that begins at `cursor`; empty when the epoch has none left."""
        stop = min(cursor + self.global_batch_size, self.length)
        if self.drop_last and stop - cursor < self.global_batch_size:
            return range(cursor, cursor)
        return range(cursor, max(cursor, stop))

    def deal(self, step: range, rank: int, world_size: int) -> tuple[Block, ...]:
        """The blocks of `rank` among `world_size` in a step.

        Plain: one contiguous part, perhaps empty; parts differ by at most one sample. With micro-batches: a contiguous run of whole
        micro-batches, perhaps none; runs differ by at most one. Lower ranks get the larger parts.
        """
        if not 0 <= rank < world_size:
            raise ConfigurationError(f"rank={rank}: expected 0 to {world_size - 1} in a world of {world_size}")
        if self.micro_batch_size is None:
            return (Block(index=rank, positions=step[_part(len(step), rank, world_size)]),)
        starts = range(0, len(step), self.micro_batch_size)
        mine = range(len(starts))[_part(len(starts), rank, world_size)]
        return tuple(Block(index=i, positions=step[starts[i] : starts[i] + self.micro_batch_size]) for i in mine)


def _part(items: int, rank: int, world_size: int) -> slice:
    """Part `rank` of `items` cut into `world_size` contiguous parts, the first `items % world_size` of which have one more."""
    each, more = divmod(items, world_size)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))
