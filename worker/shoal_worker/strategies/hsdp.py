"""Hybrid sharding: replicas of a host's size, each of which shards parameters, gradients and
optimizer state over its ranks as zero3 does.

Per rank, with S ranks in a replica and R replicas: (P+G+O)/S bytes and the largest blocks, two at a
time. Sent per step: 3P(S-1)/S within the replica, where links are fast, and 2(P/S)(R-1)/R between
replicas. (Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.2.2.)

A shard's copies in the other replicas serve as mirrors: they receive the same sums and make the
same updates. Fault tolerance therefore needs no additional traffic, unless there is only one
replica: that one mirrors its shards, like zero3.
"""

from __future__ import annotations

import functools
from typing import ClassVar

from shoal_common.errors import ConfigurationError

from shoal_worker.engine.base import Setup
from shoal_worker.sharding.engine import OPTIONS, SETTINGS, ShardedEngine, in_blocks
from shoal_worker.sharding.layout import in_replicas
from shoal_worker.sharding.unit import Stage
from shoal_worker.strategies.declaration import Strategy
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.optimizer import ShardedOptimizer


def _engine(setup: Setup) -> ShardedEngine:
    size = setup.options.get("shard_size")
    if size is not None and (type(size) is not int or size < 1):
        raise ConfigurationError(
            f"shard_size={size!r}: expected the number of ranks in a replica, at least 1, or None"
        )
    return ShardedEngine(
        setup,
        stage=Stage.PARAMETERS,
        groups=in_blocks,
        divide=functools.partial(in_replicas, shards=size),
    )


class HSDPModel(ShardedModel):
    """Parameters, gradients and optimizer state are sharded over the ranks of a replica, of which
    there are several.

    `shard_size`: ranks in a replica. None: as many as the largest host has. If it does not divide
    the number of ranks, for example after a death, replicas have the next larger number of ranks
    that does.
    """

    declaration: ClassVar[Strategy] = Strategy(
        name="hsdp",
        engine=_engine,
        memory="(P + G + O)/S + two blocks",
        sent="3P(S-1)/S within, 2(P/S)(R-1)/R between",
        a_death="loses nothing: other replicas have its shard",
        communicates_in_passes=True,
        several_models=True,
        options=OPTIONS | {"shard_size"},
        # and no compression: most of what it sends stays within a host
        settings=SETTINGS | {"shard_modules", "prefetch_blocks"},
    )


class HSDPOptimizer(ShardedOptimizer):
    """The user's optimizer, stepped on this rank's shard."""
