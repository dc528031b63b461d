"""Chooses which partitions to move next, so that all servers converge to equal shares. The module
does not depend on sessions or on the current move."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from shoal_coordinator.membership.model.shards import SMALLEST_FULL_BYTES, ShardLayout

MOST_BYTES: Final = 32 << 20
"""Maximum number of bytes of values in one move. Workers wait during a move; this amount is copied,
written and switched over in less than half a second. A small partition counts as
SMALLEST_FULL_BYTES, to account for its fixed cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Partitions to move from one place to another."""

    partitions: tuple[int, ...]
    """Ids of the partitions, ascending."""
    giver: int
    receiver: int


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """All trained partitions, or all frozen partitions. Each kind is distributed across the servers
    separately, as in `lay_out`."""

    sizes: tuple[int, ...]
    """Size of each partition's values in bytes, by partition id."""
    held: dict[int, list[int]]
    """Index of the owner -> ids of its partitions of this kind, largest first."""

    def load(self, index: int) -> int:
        """Returns the total size of a server's partitions of this kind, in bytes."""
        return sum(self.sizes[partition] for partition in self.held.get(index, ()))

    def largest(self) -> int:
        """Returns the size of the largest partition of this kind, in bytes."""
        return max((self.sizes[ids[0]] for ids in self.held.values()), default=0)


def next_move(
    layout: ShardLayout,
    *,
    givers: Collection[int],
    receivers: Collection[int],
    draining: Collection[int],
) -> Plan | None:
    """Returns the next move towards equal shares; None if no move is needed.

    A draining server gives away all its partitions, each to the server with the smallest load at
    that point. Among the other servers, the fullest gives to the emptiest if they differ by more
    than one partition of that kind. Every move therefore reduces the differences, so the sequence
    of moves is finite.

    Args:
        layout: the current layout.
        givers: indices of the servers that can hand partitions over.
        receivers: indices of the servers that can receive partitions.
        draining: indices of the servers that must give away all partitions.
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
    """Plans the next move of a draining server: partitions for one of the other servers."""
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
    """Plans a move from the fullest place to the emptiest; None if they differ too little. If the
    partitions are small enough, neither place crosses the mean load."""
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
        # Moving even the smallest partition makes one of the two places cross the mean. It is
        # smaller than the gap between them, so the move still reduces the gap.
        partitions = (kind.held[fullest][-1],)
    return Plan(partitions=partitions, giver=fullest, receiver=emptiest)


def _at_once(kind: _Kind, partitions: list[int], most_bytes: int) -> tuple[int, ...]:
    """Selects partitions for one move, in the given order, whose values have at most `most_bytes`
    in total."""
    chosen: list[int] = []
    cost = 0
    for partition in partitions:
        size = kind.sizes[partition]
        if size <= most_bytes and cost + max(size, SMALLEST_FULL_BYTES) <= MOST_BYTES:
            chosen.append(partition)
            cost += max(size, SMALLEST_FULL_BYTES)
            most_bytes -= size
    return tuple(sorted(chosen))
