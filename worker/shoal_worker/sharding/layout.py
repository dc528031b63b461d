"""How the parameters of one unit lie one after the other in a flat vector, and which elements each rank owns. Pure arithmetic.

A unit is what is gathered and reduced in one collective. Its parameters, in order, fill a vector that is padded so that it divides into
equal shards of whole cache lines, one per rank. A rank's shard is cut at the parameters' borders into pieces: an optimizer sees one piece
per parameter, perhaps an empty one, so that parameter groups keep their meaning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

_ALIGNMENT = 16
"""Elements. Shards start at multiples of it, so that vectorized kernels run on all of a shard."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of elements of one parameter that one rank owns."""

    parameter: int
    """Index in the unit."""
    start: int = 0
    """First element of the flattened parameter."""
    offset: int = 0
    """Where it lies in the shard."""
    length: int = 0
    """Number of elements; may be 0."""


@dataclass(frozen=True, kw_only=True)
class UnitLayout:
    """The parameters of a unit over `world_size` ranks."""

    shapes: tuple[torch.Size, ...]
    world_size: int

    def over(self, world_size: int) -> UnitLayout:
        """The same parameters over another number of ranks."""
        return replace(self, world_size=world_size)

    @property
    def numels(self) -> list[int]:
        """Elements of each parameter."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(self.numels)

    @property
    def shard_numel(self) -> int:
        """Elements of each rank's shard, padding included."""
        per_rank = -(-self.numel // self.world_size)
        return -(-per_rank // _ALIGNMENT) * _ALIGNMENT if self.world_size > 1 else per_rank

    @property
    def padded_numel(self) -> int:
        """Elements of the flat vector."""
        return self.shard_numel * self.world_size

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` owns of each parameter, in order."""
        first, last = rank * self.shard_numel, (rank + 1) * self.shard_numel
        pieces, begins = [], 0
        for index, numel in enumerate(self.numels):
            start, end = max(first, begins), min(last, begins + numel)
            length = max(0, end - start)
            pieces.append(
                Piece(
                    parameter=index,
                    start=start - begins if length else 0,
                    offset=start - first if length else 0,
                    length=length,
                )
            )
            begins += numel
        return tuple(pieces)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' shapes in a flat vector of `padded_numel` (or `numel`) elements."""
        parts = flat[: self.numel].split(self.numels)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def layout_of(parameters: Sequence[torch.Tensor], world_size: int) -> UnitLayout:
    """The layout of these parameters."""
    return UnitLayout(shapes=tuple(p.shape for p in parameters), world_size=world_size)
