"""Chooses the partitions to move next so that servers converge to equal shares. The module is
independent of sessions and of the current move."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from shoal_coordinator.membership.model.shards import SMALLEST_FULL_BYTES, ShardLayout

MOST_BYTES: Final = 32 << 20
"""Maximum number of bytes of values in one move. Workers wait for a move, and this much is copied,
written and switched over in a fraction of half a second. A small partition counts as
SMALLEST_FULL_BYTES, which reflects its cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Partitions to move from one place to another."""

    partitions: tuple[int, ...]
    """Ids of the partitions, ascending."""
    giver: int
    receiver: int


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """All trained or all frozen partitions. Each kind is spread separately, as in `lay_out`."""

    sizes: tuple[int, ...]
    """Bytes of each partition's values, by partition id."""
    held: dict[int, list[int]]
    """Index of the owner -> ids of its partitions of this kind, largest first."""

    def load(self, index: int) -> int:
        """Returns the bytes of a server's partitions of this kind."""
        return sum(self.sizes[partition] for partition in self.held.get(index, ()))

    def largest(self) -> int:
        """Returns the bytes of the largest partition of this kind."""
        return max((self.sizes[ids[0]] for ids in self.held.values()), default=0)


def next_move(
    layout: ShardLayout,
    *,
    givers: Collection[int],
    receivers: Collection[int],
    draining: Collection[int],
) -> Plan | None:
    """Returns the next move towards equal shares; None if no move is needed.

    Draining servers give away everything, each partition to the server with the least load at that
    point. Of the other servers, the fullest gives to the emptiest if the difference exceeds the
    bytes of one partition of that kind. Each move therefore reduces the differences, and the
    sequence of moves ends.

    Args:
        givers: indices of the servers that can hand partitions over.
        receivers: indices of the servers that can receive some.
        draining: indices of the servers that must give away everything.
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
    """Plans the first move of a draining server: the partitions that go to one of the other
    servers."""
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
    """Plans a move from the fullest place to the emptiest; None if they differ too little. Neither
    place crosses the mean if partitions are small enough."""
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
        # Moving the smallest one takes one of the two places past the mean, but still narrows the
        # gap between them, being smaller than it.
        partitions = (kind.held[fullest][-1],)
    return Plan(partitions=partitions, giver=fullest, receiver=emptiest)


def _at_once(kind: _Kind, partitions: list[int], most_bytes: int) -> tuple[int, ...]:
    """Selects as many of `partitions` as fit in one move, with at most `most_bytes` of values."""
    chosen: list[int] = []
    cost = 0
    for partition in partitions:
        size = kind.sizes[partition]
        if size <= most_bytes and cost + max(size, SMALLEST_FULL_BYTES) <= MOST_BYTES:
            chosen.append(partition)
            cost += max(size, SMALLEST_FULL_BYTES)
            most_bytes -= size
    return tuple(sorted(chosen))
