"""Where sharded elements lie, and what moves when that changes. Pure arithmetic: all ranks compute the same.

Within a unit (`UnitLayout`): what is gathered and reduced in one collective. Its parameters, in order, fill a vector that is padded so that
it divides into equal shards of whole cache lines, one per rank. A rank's shard is cut at the parameters' borders into pieces: an optimizer
sees one piece per parameter, perhaps an empty one, so that parameter groups keep their meaning.

Among ranks (`Division`): into how many shards a model is divided, and which of them each rank holds. Ranks that hold all shards between
them are a replica: adjacent ranks, so that a replica of a host's size lies on one host. With one replica each shard is mirrored by another
rank; with several each has its copies in the others, and needs no mirror.

From one division to another (`runs` and below): position p of w is the p-th of w equal parts of a unit's flat vector. Before a move each
old position is held by one or more ranks (its owner, its buddy); after it, each rank holds the positions given to it. One all-to-all per
vector does it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shoal_worker.elastic.generation import Topology

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


def buddy_stride(topology: Topology) -> int:
    """How many ranks further the mirror of a shard lies: as many as the largest host has. Ranks of one host are adjacent, so no mirror lies
    on its shard's own host, unless that host has more than half of the ranks."""
    return topology.most_local % topology.world_size or 1


@dataclass(frozen=True, kw_only=True)
class Division:
    """How `world_size` ranks are divided into replicas that hold all shards between them."""

    world_size: int
    shards: int
    """Divides `world_size`."""
    stride: int = 1
    """With one replica: how many ranks further a shard is mirrored."""

    @property
    def replicas(self) -> int:
        """How many ranks hold each shard as their own."""
        return self.world_size // self.shards

    @property
    def mirrors(self) -> bool:
        """Ranks hold other ranks' shards beside their own."""
        return self.replicas == 1 and self.shards > 1

    def position(self, rank: int) -> int:
        """Which shard is the rank's own."""
        return rank % self.shards

    def mirrored(self, rank: int) -> int | None:
        """Which shard it mirrors."""
        return (rank - self.stride) % self.shards if self.mirrors else None

    def held(self, rank: int) -> list[int]:
        """All shards that it holds, ascending."""
        mirrored = self.mirrored(rank)
        return sorted({self.position(rank)} | ({mirrored} if mirrored is not None else set()))

    def replica(self, rank: int) -> int:
        """Number of the replica that the rank belongs to."""
        return rank // self.shards


def among_all(topology: Topology) -> Division:
    """A shard for each rank."""
    return Division(world_size=topology.world_size, shards=topology.world_size, stride=buddy_stride(topology))


def in_replicas(topology: Topology, shards: int | None) -> Division:
    """Replicas of so many ranks; None: of as many as the largest host has. If that does not divide the number of ranks: of the next larger
    number that does, at last of all of them. So no rank comes to hold more than was asked for."""
    world_size = topology.world_size
    wanted = min(shards or topology.most_local, world_size)
    fitting = next(number for number in range(wanted, world_size + 1) if world_size % number == 0)
    return Division(world_size=world_size, shards=fitting, stride=buddy_stride(topology))


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Elements [start, end) of the flat vector that one rank sends to another, from one position to one position."""

    start: int
    end: int
    old_position: int
    new_position: int


def runs(
    *, numel: int, old_shard: int, new_shard: int, sends: Mapping[int, int], gets: Sequence[Sequence[int]]
) -> list[list[list[Transfer]]]:
    """[sender][receiver] -> the runs that travel, in the order in which they lie in the message.

    Args:
        numel: elements of the flat vector, without padding.
        old_shard, new_shard: elements of a shard before and after, padding included.
        sends: the rank that sends each old position.
        gets: the new positions that each rank of the new group will hold.
    """
    table: list[list[list[Transfer]]] = [[[] for _ in gets] for _ in gets]
    for receiver, positions in enumerate(gets):
        for new_position in positions:
            first, last = new_position * new_shard, min(numel, (new_position + 1) * new_shard)
            for old_position in range(first // old_shard, -(-last // old_shard) if last > first else first // old_shard):
                start, end = max(first, old_position * old_shard), min(last, (old_position + 1) * old_shard)
                if start < end:
                    run = Transfer(start=start, end=end, old_position=old_position, new_position=new_position)
                    table[sends[old_position]][receiver].append(run)
    return table


def message(table: Sequence[Sequence[Sequence[Transfer]]], rank: int, shards: Mapping[int, torch.Tensor], old_shard: int) -> torch.Tensor:
    """What `rank` sends, to all receivers one after the other. `shards`: the old positions that it holds."""
    parts = [
        shards[run.old_position][run.start - run.old_position * old_shard : run.end - run.old_position * old_shard]
        for to_receiver in table[rank]
        for run in to_receiver
    ]
    return torch.cat(parts) if parts else next(iter(shards.values())).new_empty(0)


def sizes(table: Sequence[Sequence[Sequence[Transfer]]], rank: int) -> tuple[list[int], list[int]]:
    """Elements that `rank` receives from each rank, and sends to each."""
    received = [sum(run.end - run.start for run in row[rank]) for row in table]
    sent = [sum(run.end - run.start for run in to_receiver) for to_receiver in table[rank]]
    return received, sent


def place(
    table: Sequence[Sequence[Sequence[Transfer]]], rank: int, received: torch.Tensor, shards: Mapping[int, torch.Tensor], new_shard: int
) -> None:
    """Puts what `rank` received where it belongs. `shards`: its new positions, to be filled."""
    offset = 0
    for row in table:
        for run in row[rank]:
            length, begins = run.end - run.start, run.start - run.new_position * new_shard
            shards[run.new_position][begins : begins + length] = received[offset : offset + length]
            offset += length
