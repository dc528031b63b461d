"""Hybrid sharding: replicas of a host's size, each of which cuts parameters, gradients and optimizer state over its ranks as zero3 does.

Per rank, with S ranks in a replica and R replicas: (P+G+O)/S bytes and the largest blocks, two at a time. Sent per step: 3P(S-1)/S within
the replica, where links are fast, and 2(P/S)(R-1)/R between replicas. (Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.2.2.)

A shard's copies in the other replicas are what mirrors are elsewhere: they get the same sums and make the same updates. So nothing is sent
for the sake of faults, unless there is one replica alone: that one mirrors its shards, and is zero3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from shoal_common.errors import ConfigurationError

from shoal_worker.elastic.group import Group
from shoal_worker.sharding.collectives import ReplicatedCollectives
from shoal_worker.sharding.division import Division, in_replicas
from shoal_worker.strategies.sharded_optimizer import ShardedParametersOptimizer
from shoal_worker.strategies.zero3 import ZeRO3Model


class HSDPModel(ZeRO3Model):
    """Parameters, gradients and optimizer state are cut over the ranks of a replica, and there are several.

    `shard_size`: ranks in a replica. None: as many as the largest host has. Where it does not divide the number of ranks, after a death
    say, replicas have the next larger number of ranks that does.
    """

    strategy: ClassVar[str] = "hsdp"
    compresses: ClassVar[bool] = False  # most of what it sends stays within a host
    options: ClassVar[frozenset[str]] = ZeRO3Model.options | {"shard_size"}

    _collectives: ReplicatedCollectives

    def collectives(self) -> ReplicatedCollectives:
        """See `CutModel`."""
        return ReplicatedCollectives(self._session)

    def on_before_initialize_sharding(self) -> None:
        """Raises ConfigurationError for a `shard_size` that cannot be."""
        size = self._options.get("shard_size")
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigurationError(f"shard_size={size!r}: expected the number of ranks in a replica, at least 1, or None")

    def divide(self, hosts: Sequence[str]) -> Division:
        """See `CutModel`."""
        return in_replicas(hosts, self._options.get("shard_size"))

    def regroup(self, group: Group) -> None:
        """See `Replica`."""
        self._collectives.connect(group, self.divide([peer.host for peer in group.generation.peers]))
        super().regroup(group)


class HSDPOptimizer(ShardedParametersOptimizer):
    """The user's optimizer, stepped on this rank's shard."""
