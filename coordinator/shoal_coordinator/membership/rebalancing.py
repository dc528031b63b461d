"""Which partitions are to move next, so that servers come to hold equal shares. Knows nothing of
sessions, nor of the move under way."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from shoal_coordinator.membership.shards import SMALLEST_FULL_BYTES, ShardLayout

MOST_BYTES: Final = 32 << 20
"""Bytes of values in one move, for which workers wait: so much is copied, written and switched in a
fraction of half a second. A small partition counts as SMALLEST_FULL_BYTES, which is what it
costs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Partitions for one move, between two places."""

    partitions: tuple[int, ...]
    """Ids, ascending."""
    giver: int
    receiver: int


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """The partitions that are trained, or those that are not: each kind is spread by itself, as
    `lay_out` does it."""

    sizes: tuple[int, ...]
    """Bytes of each partition's values, by its partition id."""
    held: dict[int, list[int]]
    """Owner -> ids of this kind, the largest first."""

    def load(self, index: int) -> int:
        """Bytes of a server's share."""
        return sum(self.sizes[partition] for partition in self.held.get(index, ()))

    def largest(self) -> int:
        """Bytes of the largest partition."""
        return max((self.sizes[ids[0]] for ids in self.held.values()), default=0)


def next_move(
    layout: ShardLayout,
    *,
    givers: Collection[int],
    receivers: Collection[int],
    draining: Collection[int],
) -> Plan | None:
    """The move that brings the servers nearer to equal shares; None: there is none to make.

    Servers that drain give away all that they have, each partition to whom has the least then.
    Among the others the fullest gives to the emptiest where it has more than one partition's bytes
    above it, of the kind in question; so the differences grow smaller with each move, and moves
    end.

    Args:
        givers: indices of the servers that can hand partitions over.
        receivers: indices of those that can take some.
        draining: indices of those that are to give away all.
    """
    receiving = sorted(set(receivers) - set(draining))
    kinds = [_kind(layout, frozen=frozen) for frozen in (False, True)]
    for kind in kinds:
        for giver in sorted(set(draining) & set(givers)):
            if giver in kind.held and receiving:
                return _given_away(kind, giver, receiving)
    for kind in kinds:
        plan = _evened_out(kind, sorted(set(givers) - set(draining)), receiving)
        if plan is not None:
            return plan
    return None


def _kind(layout: ShardLayout, *, frozen: bool) -> _Kind:
    sizes = layout.sizes
    held: dict[int, list[int]] = {}
    for partition_id, partition in enumerate(layout.partitions):
        if layout.is_frozen(partition) is frozen:
            held.setdefault(partition.primary, []).append(partition_id)
    for ids in held.values():
        ids.sort(key=lambda partition_id: (-sizes[partition_id], partition_id))
    return _Kind(sizes=sizes, held=held)


def _given_away(kind: _Kind, giver: int, receivers: list[int]) -> Plan:
    """The first part of what a server that drains gives to one of the others."""
    loads = {index: kind.load(index) for index in receivers}
    first = min(receivers, key=lambda index: (loads[index], index))
    to_first: list[int] = []
    for partition in kind.held[giver]:
        receiver = min(receivers, key=lambda index: (loads[index], index))
        loads[receiver] += kind.sizes[partition]
        if receiver == first:
            to_first.append(partition)
    return Plan(partitions=_at_once(kind, to_first, sum(kind.sizes)), giver=giver, receiver=first)


def _evened_out(kind: _Kind, givers: list[int], receivers: list[int]) -> Plan | None:
    """Plans a move from the fullest place to the emptiest. It carries neither past the mean where
    partitions are small enough."""
    loads = {index: kind.load(index) for index in {*givers, *receivers}}
    if not givers or not receivers:
        return None
    fullest = max(givers, key=lambda index: (loads[index], -index))
    emptiest = min(receivers, key=lambda index: (loads[index], index))
    gap = loads[fullest] - loads[emptiest]
    if gap <= kind.largest():
        return None
    mean = sum(loads.values()) // len(loads)
    partitions = _at_once(
        kind, kind.held[fullest], min(loads[fullest] - mean, mean - loads[emptiest])
    )
    if not partitions:
        # the smallest carries one of them past the mean, but makes the gap smaller: it is smaller
        # than the gap
        partitions = (kind.held[fullest][-1],)
    return Plan(partitions=partitions, giver=fullest, receiver=emptiest)


def _at_once(kind: _Kind, partitions: list[int], most_bytes: int) -> tuple[int, ...]:
    """Chooses as many of these as one move may have, with `most_bytes` of values at most."""
    chosen: list[int] = []
    cost = 0
    for partition in partitions:
        size = kind.sizes[partition]
        if size <= most_bytes and cost + max(size, SMALLEST_FULL_BYTES) <= MOST_BYTES:
            chosen.append(partition)
            cost += max(size, SMALLEST_FULL_BYTES)
            most_bytes -= size
    return tuple(sorted(chosen))
