"""How the ranks of a group divide a model: into how many shards, and which of them each rank holds. Pure arithmetic.

Ranks that hold all shards between them are a replica: adjacent ranks, so that a replica of a host's size lies on one host. With one replica
each shard is mirrored by another rank; with several each has its copies in the others, and needs no mirror.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


def buddy_stride(hosts: Sequence[str]) -> int:
    """How many ranks further the mirror of a shard lies: as many as the largest host has. Ranks of one host are adjacent, so no mirror lies
    on its shard's own host, unless that host has more than half of the ranks."""
    return max(Counter(hosts).values()) % len(hosts) or 1


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


def among_all(hosts: Sequence[str]) -> Division:
    """A shard for each rank. `hosts`: of the ranks; at least one."""
    return Division(world_size=len(hosts), shards=len(hosts), stride=buddy_stride(hosts))


def in_replicas(hosts: Sequence[str], shards: int | None) -> Division:
    """Replicas of so many ranks; None: of as many as the largest host has. If that does not divide the number of ranks: of the next larger
    number that does, at last of all of them. So no rank comes to hold more than was asked for."""
    world_size = len(hosts)
    wanted = min(shards or max(Counter(hosts).values()), world_size)
    fitting = next(number for number in range(wanted, world_size + 1) if world_size % number == 0)
    return Division(world_size=world_size, shards=fitting, stride=buddy_stride(hosts))
