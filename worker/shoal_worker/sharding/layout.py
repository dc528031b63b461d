"""Where sharded elements lie, and what moves when that changes. Pure arithmetic: all ranks compute
the same.

Within a unit (`UnitLayout`): what is gathered and reduced in one collective. Its parameters, in
order, fill a vector that is padded so that it divides into equal shards of whole cache lines, one
per rank. A rank's shard is cut at the parameters' borders into pieces: an optimizer sees one piece
per parameter, perhaps an empty one, so that parameter groups keep their meaning.

An optimizer that looks at whole tensors gets another layout (`whole_tensors`): each parameter has
one owner, and the piece of every other rank is empty. Shards are as long as the longest needs to
be, so that the same collectives move them.

Among ranks (`Division`): into how many shards a model is divided, and which of them each rank
holds. Ranks that hold all shards between them are a replica: adjacent ranks, so that a replica of a
host's size lies on one host. With one replica each shard is mirrored by another rank; with several
each has its copies in the others, and needs no mirror.

From one division to another (`runs` and below): position p of w is the p-th of w shards of a unit's
layout. Before a move each old position is held by one or more ranks (its owner, its buddy); after
it, each rank holds the positions given to it. One all-to-all per vector does it.
"""

from __future__ import annotations

import functools
import itertools
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
class Segment:
    """Elements that are adjacent in the parameters, one after the other, and in one shard."""

    start: int
    """The first of them, counted over all parameters in order."""
    length: int
    position: int
    """Which shard they are in."""
    offset: int
    """Where they lie in it."""


@dataclass(frozen=True, kw_only=True)
class UnitLayout:
    """The parameters of a unit over `world_size` ranks."""

    shapes: tuple[torch.Size, ...]
    world_size: int
    whole_tensors: bool = False
    """No parameter is cut: each lies in one rank's shard."""
    turn: int = 0
    """With `whole_tensors`, which rank is the first to be dealt to: another one in each unit, so
    that no rank gets the largest of all."""

    def over(self, world_size: int) -> UnitLayout:
        """The same parameters over another number of ranks."""
        return replace(self, world_size=world_size)

    @functools.cached_property
    def numels(self) -> list[int]:
        """Elements of each parameter."""
        return [math.prod(shape) for shape in self.shapes]

    @functools.cached_property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(self.numels)

    @functools.cached_property
    def owners(self) -> list[int]:
        """With `whole_tensors`, the rank that owns each parameter: the largest parameter is dealt
        first, each to the rank that has the fewest elements (Graham, "Bounds on Multiprocessing
        Timing Anomalies", 1969). Depends on sizes, `world_size` and `turn` alone."""
        owners, loads = [0] * len(self.shapes), [0] * self.world_size
        for index in sorted(range(len(self.shapes)), key=lambda i: (-self.numels[i], i)):
            owners[index] = min(
                range(self.world_size),
                key=lambda rank: (loads[rank], (rank - self.turn) % self.world_size),
            )
            loads[owners[index]] += self.numels[index]
        return owners

    @functools.cached_property
    def shard_numel(self) -> int:
        """Elements of each rank's shard, padding included."""
        if self.whole_tensors:
            loads = [0] * self.world_size
            for owner, numel in zip(self.owners, self.numels, strict=True):
                loads[owner] += numel
            per_rank = max(loads)
        else:
            per_rank = -(-self.numel // self.world_size)
        return -(-per_rank // _ALIGNMENT) * _ALIGNMENT if self.world_size > 1 else per_rank

    @property
    def padded_numel(self) -> int:
        """Elements of the flat vector."""
        return self.shard_numel * self.world_size

    @functools.cached_property
    def starts(self) -> list[int]:
        """Where each parameter begins in the flat vector."""
        if not self.whole_tensors:
            return [0, *itertools.accumulate(self.numels)][: len(self.numels)]
        ends, starts = [rank * self.shard_numel for rank in range(self.world_size)], []
        for owner, numel in zip(self.owners, self.numels, strict=True):
            starts.append(ends[owner])
            ends[owner] += numel
        return starts

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` owns of each parameter, in order."""
        first, last = rank * self.shard_numel, (rank + 1) * self.shard_numel
        pieces = []
        for index, (numel, begins) in enumerate(zip(self.numels, self.starts, strict=True)):
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
        return tuple(pieces)

    def piece(self, shard: torch.Tensor, cut: Piece) -> torch.Tensor:
        """A piece's elements in its shard: flat, or in the parameter's shape where tensors are
        whole and the piece is not empty."""
        flat = shard[cut.offset : cut.offset + cut.length]
        return flat.view(self.shapes[cut.parameter]) if self.whole_tensors and cut.length else flat

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' shapes in a flat vector of this layout. Its last padding may be
        missing."""
        return [
            flat[start : start + numel].view(shape)
            for start, numel, shape in zip(self.starts, self.numels, self.shapes, strict=True)
        ]

    @functools.cached_property
    def segments(self) -> list[Segment]:
        """All elements, in order."""
        if not self.whole_tensors:
            size, positions = (
                self.shard_numel,
                range(-(-self.numel // self.shard_numel) if self.numel else 0),
            )
            return [
                Segment(
                    start=p * size, length=min(size, self.numel - p * size), position=p, offset=0
                )
                for p in positions
            ]
        segments, begins = [], 0
        for numel, owner, start in zip(self.numels, self.owners, self.starts, strict=True):
            if numel:
                segments.append(
                    Segment(
                        start=begins,
                        length=numel,
                        position=owner,
                        offset=start - owner * self.shard_numel,
                    )
                )
            begins += numel
        return segments

    def shard_of(self, elements: torch.Tensor, position: int) -> torch.Tensor:
        """A copy of one shard of the `numel` elements of the parameters in order; zero where it is
        padded."""
        shard = elements.new_zeros(self.shard_numel)
        for segment in self.segments:
            if segment.position == position:
                shard[segment.offset : segment.offset + segment.length] = elements[
                    segment.start : segment.start + segment.length
                ]
        return shard

    def in_order(self, flat: torch.Tensor) -> torch.Tensor:
        """The elements of the parameters in order, out of a flat vector; may share memory with
        it."""
        return (
            torch.cat([view.reshape(-1) for view in self.views(flat)])
            if self.whole_tensors
            else flat[: self.numel]
        )


def layout_of(parameters: Sequence[torch.Tensor], world_size: int) -> UnitLayout:
    """The layout of these parameters."""
    return UnitLayout(shapes=tuple(p.shape for p in parameters), world_size=world_size)


def buddy_stride(topology: Topology) -> int:
    """How many ranks further the mirror of a shard lies: as many as the largest host has. Ranks of
    one host are adjacent, so no mirror lies on its shard's own host, unless that host has more than
    half of the ranks."""
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
    return Division(
        world_size=topology.world_size, shards=topology.world_size, stride=buddy_stride(topology)
    )


def in_replicas(topology: Topology, shards: int | None) -> Division:
    """Replicas of so many ranks; None: of as many as the largest host has. If that does not divide
    the number of ranks: of the next larger number that does, at last of all of them. So no rank
    comes to hold more than was asked for."""
    world_size = topology.world_size
    wanted = min(shards or topology.most_local, world_size)
    fitting = next(number for number in range(wanted, world_size + 1) if world_size % number == 0)
    return Division(world_size=world_size, shards=fitting, stride=buddy_stride(topology))


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Adjacent elements of a shard that one rank sends to another, where they are adjacent in a
    shard again."""

    length: int
    old_position: int
    old_offset: int
    new_position: int
    new_offset: int


def runs(
    *, old: UnitLayout, new: UnitLayout, sends: Mapping[int, int], gets: Sequence[Sequence[int]]
) -> list[list[list[Transfer]]]:
    """[sender][receiver] -> the runs that travel, in the order in which they lie in the message.

    Args:
        old, new: of the same parameters, before and after.
        sends: the rank that sends each old position.
        gets: the new positions that each rank of the new group will hold.
    """
    moved = _overlaps(old.segments, new.segments)
    table: list[list[list[Transfer]]] = [[[] for _ in gets] for _ in gets]
    for receiver, positions in enumerate(gets):
        for run in moved:
            if run.new_position in positions:
                table[sends[run.old_position]][receiver].append(run)
    return table


def _overlaps(old: Sequence[Segment], new: Sequence[Segment]) -> list[Transfer]:
    """What is adjacent in both. Both are in order, and hold the same elements."""
    overlaps, at_old, at_new = [], 0, 0
    while at_old < len(old) and at_new < len(new):
        before, after = old[at_old], new[at_new]
        start = max(before.start, after.start)
        end = min(before.start + before.length, after.start + after.length)
        overlaps.append(
            Transfer(
                length=end - start,
                old_position=before.position,
                old_offset=before.offset + start - before.start,
                new_position=after.position,
                new_offset=after.offset + start - after.start,
            )
        )
        at_old += before.start + before.length == end
        at_new += after.start + after.length == end
    return overlaps


def message(
    table: Sequence[Sequence[Sequence[Transfer]]], rank: int, shards: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """What `rank` sends, to all receivers one after the other. `shards`: the old positions that it
    holds."""
    parts = [
        shards[run.old_position][run.old_offset : run.old_offset + run.length]
        for to_receiver in table[rank]
        for run in to_receiver
    ]
    return torch.cat(parts) if parts else next(iter(shards.values())).new_empty(0)


def sizes(table: Sequence[Sequence[Sequence[Transfer]]], rank: int) -> tuple[list[int], list[int]]:
    """Elements that `rank` receives from each rank, and sends to each."""
    received = [sum(run.length for run in row[rank]) for row in table]
    sent = [sum(run.length for run in to_receiver) for to_receiver in table[rank]]
    return received, sent


def place(
    table: Sequence[Sequence[Sequence[Transfer]]],
    rank: int,
    received: torch.Tensor,
    shards: Mapping[int, torch.Tensor],
) -> None:
    """Puts what `rank` received where it belongs. `shards`: its new positions, to be filled."""
    offset = 0
    for row in table:
        for run in row[rank]:
            shards[run.new_position][run.new_offset : run.new_offset + run.length] = received[
                offset : offset + run.length
            ]
            offset += run.length
