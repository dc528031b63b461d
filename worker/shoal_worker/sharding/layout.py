"""Layout of sharded elements across ranks, and the transfers when the layout changes. Pure
arithmetic: all ranks compute the same results.

A unit (`UnitLayout`) is gathered and reduced in one collective. Its parameters, in order, fill a
vector, which is padded so that it can be divided into equal shards of complete cache lines, one per
rank. A rank's shard is divided into pieces at the boundaries between parameters. The optimizer gets
one piece of each parameter, possibly empty, so that its parameter groups remain valid.

An optimizer that needs entire tensors requires a different layout (`whole_tensors`): each parameter
has one owner, and the pieces of all other ranks are empty. All shards are padded to the length of
the longest one, so that the same collectives can be used.

A `Division` defines the number of shards of a model, and which shards each rank has. Ranks that
together have all shards form a replica. The ranks of a replica are consecutive, so a replica is on
one host if it has as many ranks as each host. With one replica, each shard is mirrored by a second
rank. With several replicas, each shard has copies in the other replicas and is not mirrored.

`runs` and the functions below it move elements from one division to another. A position is the
index of a shard among a unit's shards. Before the move, the shard at each old position is on one or
more ranks: its owners and its mirror holder. Afterwards, each rank has the shards at its new
positions. The move takes one all-to-all per vector.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shoal_worker.elastic.contract.generation import Topology

_ALIGNMENT = 16
"""Shards start at multiples of this number of elements, so that vectorized kernels can process a
shard without a remainder."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One rank's range of the elements of one parameter."""

    parameter: int
    """Index of the parameter in the unit."""
    start: int = 0
    """Index of the range's first element in the flattened parameter."""
    offset: int = 0
    """Offset of the range in the shard."""
    length: int = 0
    """Number of elements; may be 0."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Range of elements that is contiguous both in the concatenated parameters and in one shard."""

    start: int
    """Index of the first element, counted over all parameters in order."""
    length: int
    position: int
    """Position of the shard that contains the elements."""
    offset: int
    """Offset of the elements in the shard."""


@dataclass(frozen=True, kw_only=True)
class UnitLayout:
    """Layout of a unit's parameters across `world_size` ranks."""

    shapes: tuple[torch.Size, ...]
    world_size: int
    whole_tensors: bool = False
    """True if no parameter is split: each parameter is in a single rank's shard."""
    turn: int = 0
    """Rank where the assignment of entire tensors starts. It differs between units, so that no rank
    gets the largest tensor of every unit."""

    def over(self, world_size: int) -> UnitLayout:
        """Returns the layout of the same parameters across a different number of ranks."""
        return replace(self, world_size=world_size)

    @functools.cached_property
    def numels(self) -> list[int]:
        """Number of elements of each parameter."""
        return [math.prod(shape) for shape in self.shapes]

    @functools.cached_property
    def numel(self) -> int:
        """Number of elements of all parameters, without padding."""
        return sum(self.numels)

    @functools.cached_property
    def owners(self) -> list[int]:
        """Rank that owns each parameter, if `whole_tensors`. Parameters are assigned in order of
        size, the largest first, each to the rank with the fewest elements (Graham, "Bounds on
        Multiprocessing Timing Anomalies", 1969). Depends only on sizes, `world_size` and `turn`."""
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
        """Number of elements in each rank's shard, including padding."""
        if self.whole_tensors:
            loads = [0] * self.world_size
            for owner, numel in zip(self.owners, self.numels, strict=True):
                loads[owner] += numel
            per_rank = max(loads)
        else:
            per_rank = -(-self.numel // self.world_size)
        return -(-per_rank // _ALIGNMENT) * _ALIGNMENT if self.world_size > 1 else per_rank

    @functools.cached_property
    def padded_numel(self) -> int:
        """Number of elements in the flat vector, including padding."""
        return self.shard_numel * self.world_size

    @functools.cached_property
    def starts(self) -> list[int]:
        """Index of each parameter's first element in the flat vector."""
        if not self.whole_tensors:
            return [0, *itertools.accumulate(self.numels)][: len(self.numels)]
        ends, starts = [rank * self.shard_numel for rank in range(self.world_size)], []
        for owner, numel in zip(self.owners, self.numels, strict=True):
            starts.append(ends[owner])
            ends[owner] += numel
        return starts

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Returns `rank`'s piece of each parameter, in order."""
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
        """Returns a view of a piece's elements in its shard: flat, or in the parameter's shape if
        tensors are not split and the piece is not empty."""
        flat = shard[cut.offset : cut.offset + cut.length]
        return flat.view(self.shapes[cut.parameter]) if self.whole_tensors and cut.length else flat

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the parameters as views of a flat vector with this layout. The padding at the end
        of the vector may be missing."""
        return [
            flat[start : start + numel].view(shape)
            for start, numel, shape in zip(self.starts, self.numels, self.shapes, strict=True)
        ]

    @functools.cached_property
    def segments(self) -> list[Segment]:
        """All elements of the parameters in order, as segments."""
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
        """Returns a zero-padded copy of one shard. `elements`: elements of all parameters, in order
        and without padding."""
        shard = elements.new_zeros(self.shard_numel)
        for segment in self.segments:
            if segment.position == position:
                shard[segment.offset : segment.offset + segment.length] = elements[
                    segment.start : segment.start + segment.length
                ]
        return shard

    def in_order(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the parameters' elements, in order and without padding, from a flat vector. The
        result may share memory with the vector."""
        return (
            torch.cat([view.reshape(-1) for view in self.views(flat)])
            if self.whole_tensors
            else flat[: self.numel]
        )


def layout_of(parameters: Sequence[torch.Tensor], world_size: int) -> UnitLayout:
    """Returns the layout of these parameters."""
    return UnitLayout(shapes=tuple(p.shape for p in parameters), world_size=world_size)


def mirror_stride(topology: Topology) -> int:
    """Returns the distance in ranks from the owner of a shard to its mirror holder: the number of
    ranks on the largest host. Since the ranks of a host are consecutive, a shard and its mirror are
    never on the same host, unless that host has more than half of the ranks."""
    return topology.most_local % topology.world_size or 1


@dataclass(frozen=True, kw_only=True)
class Division:
    """Division of `world_size` ranks into replicas, each of which has all shards."""

    world_size: int
    shards: int
    """Number of shards; divides `world_size`."""
    stride: int = 1
    """Distance in ranks from a shard's owner to its mirror holder, used if there is only one
    replica."""

    @property
    def replicas(self) -> int:
        """Number of replicas, which is also the number of ranks that own each shard."""
        return self.world_size // self.shards

    @property
    def mirrors(self) -> bool:
        """True if ranks mirror other ranks' shards in addition to their own shards."""
        return self.replicas == 1 and self.shards > 1

    def position(self, rank: int) -> int:
        """Returns the position of the rank's own shard."""
        return rank % self.shards

    def mirrored(self, rank: int) -> int | None:
        """Returns the position of the shard that `rank` mirrors; None if shards are not
        mirrored."""
        return (rank - self.stride) % self.shards if self.mirrors else None

    def held(self, rank: int) -> list[int]:
        """Returns the positions of all shards on `rank`, in ascending order."""
        mirrored = self.mirrored(rank)
        return sorted({self.position(rank)} | ({mirrored} if mirrored is not None else set()))

    def replica(self, rank: int) -> int:
        """Returns the index of the rank's replica."""
        return rank // self.shards


def among_all(topology: Topology) -> Division:
    """Returns a division with one shard per rank."""
    return Division(
        world_size=topology.world_size, shards=topology.world_size, stride=mirror_stride(topology)
    )


def in_replicas(topology: Topology, shards: int | None) -> Division:
    """Returns a division into replicas of `shards` ranks; None: as many as the largest host has. If
    this number does not divide the number of ranks, the next larger divisor is used, so that no
    rank has a larger part of the state than requested."""
    world_size = topology.world_size
    wanted = min(shards or topology.most_local, world_size)
    fitting = next(number for number in range(wanted, world_size + 1) if world_size % number == 0)
    return Division(world_size=world_size, shards=fitting, stride=mirror_stride(topology))


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Range of elements that one rank sends to another. The range is contiguous both in the old and
    in the new shard."""

    length: int
    old_position: int
    old_offset: int
    new_position: int
    new_offset: int


def runs(
    *, old: UnitLayout, new: UnitLayout, sends: Mapping[int, int], gets: Sequence[Sequence[int]]
) -> list[list[list[Transfer]]]:
    """Returns the ranges of elements to be sent, by sender and receiver, in the order in which the
    messages contain them.

    Args:
        old, new: layouts of the same parameters before and after the move.
        sends: for each old position, the rank that sends its shard.
        gets: for each rank of the new group, its new positions.
    """
    moved = _overlaps(old.segments, new.segments)
    table: list[list[list[Transfer]]] = [[[] for _ in gets] for _ in gets]
    for receiver, positions in enumerate(gets):
        for run in moved:
            if run.new_position in positions:
                table[sends[run.old_position]][receiver].append(run)
    return table


def _overlaps(old: Sequence[Segment], new: Sequence[Segment]) -> list[Transfer]:
    """Returns the ranges that are contiguous in both lists of segments. Both lists are ordered and
    cover the same elements."""
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
    """Returns the elements that `rank` sends, concatenated in the order of the receivers. `shards`:
    the rank's shards, by old position."""
    parts = [
        shards[run.old_position][run.old_offset : run.old_offset + run.length]
        for to_receiver in table[rank]
        for run in to_receiver
    ]
    return torch.cat(parts) if parts else next(iter(shards.values())).new_empty(0)


def sizes(table: Sequence[Sequence[Sequence[Transfer]]], rank: int) -> tuple[list[int], list[int]]:
    """Returns how many elements `rank` receives from each rank, and how many it sends to each
    rank."""
    received = [sum(run.length for run in row[rank]) for row in table]
    sent = [sum(run.length for run in to_receiver) for to_receiver in table[rank]]
    return received, sent


def place(
    table: Sequence[Sequence[Sequence[Transfer]]],
    rank: int,
    received: torch.Tensor,
    shards: Mapping[int, torch.Tensor],
) -> None:
    """Copies the elements that `rank` has received into its new shards. `shards`: the rank's new
    shards, by position."""
    offset = 0
    for row in table:
        for run in row[rank]:
            shards[run.new_position][run.new_offset : run.new_offset + run.length] = received[
                offset : offset + run.length
            ]
            offset += run.length
