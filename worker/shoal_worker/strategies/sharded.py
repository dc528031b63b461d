"""Strategies that shard state across the data-parallel ranks: zero1, zero2, zero3, fsdp and hsdp.

zero1 shards the optimizer state. zero2 also shards gradients. The other strategies also shard
parameters; a block's parameters are gathered only while the block computes. zero1 and zero2 send as
much as ddp: they reduce-scatter gradients and all-gather updated parameters, 2P(N-1)/N bytes per
rank per step (P: bytes of parameters, N: number of ranks). zero3 gathers parameters for the forward
pass and again for the backward pass, so it sends 3P(N-1)/N. (Rajbhandari et al., "ZeRO", SC 2020,
sections 5.1 to 5.3 and 7.2.)

fsdp is zero3 under a name familiar to users of torch's FSDP. hsdp has several replicas, each
sharded like zero3. By default, a replica has as many ranks as a host. It sends 3P(S-1)/S bytes
within the replica, where links are fast, and 2(P/S)(R-1)/R between replicas, with S ranks in a
replica and R replicas. The other replicas have copies of each shard, which receive the same
gradient sums and apply the same updates, and so serve as its mirrors. With several replicas, fault
tolerance therefore needs no additional traffic. (Zhao et al., "PyTorch FSDP", VLDB 2023, sections 3
and 3.2.2.)
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

from shoal_common.errors import ConfigurationError

from shoal_worker.engine.base import Setup
from shoal_worker.sharding.engine import OPTIONS, SETTINGS, ShardedEngine, in_blocks, in_buckets
from shoal_worker.sharding.layout import in_replicas
from shoal_worker.sharding.unit import Stage
from shoal_worker.strategies.declaration import Strategy
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.optimizer import ShardedOptimizer


def _hybrid(setup: Setup) -> ShardedEngine:
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


_ZERO1 = Strategy(
    name="zero1",
    engine=functools.partial(ShardedEngine, stage=Stage.OPTIMIZER, groups=in_buckets),
    memory="P + G + O/N",
    sent="2P(N-1)/N",
    a_death="nothing is lost: its shard is mirrored",
    options=OPTIONS,
    settings=SETTINGS,
    compressor="topk",
    communicates_in_passes=True,
    several_models=True,
)
_ZERO2 = dataclasses.replace(
    _ZERO1,
    name="zero2",
    engine=functools.partial(ShardedEngine, stage=Stage.GRADIENTS, groups=in_buckets),
    memory="P + (G + O)/N",
)
_ZERO3 = dataclasses.replace(
    _ZERO1,
    name="zero3",
    engine=functools.partial(ShardedEngine, stage=Stage.PARAMETERS, groups=in_blocks),
    memory="(P + G + O)/N + two blocks",
    sent="3P(N-1)/N",
    settings=SETTINGS | {"shard_modules", "prefetch_blocks"},
)
_FSDP = dataclasses.replace(_ZERO3, name="fsdp")
_HSDP = dataclasses.replace(
    _ZERO3,
    name="hsdp",
    engine=_hybrid,
    memory="(P + G + O)/S + two blocks",
    sent="3P(S-1)/S within a replica, 2(P/S)(R-1)/R between replicas",
    a_death="nothing is lost: other replicas have its shard",
    options=OPTIONS | {"shard_size"},
    compressor=None,  # most traffic stays within a host
)


class ZeRO1Model(ShardedModel):
    """A model with optimizer state sharded across ranks. Memory per rank: P + G + O/N bytes (P:
    parameters, G: gradients, O: optimizer state, N: number of ranks)."""

    declaration: ClassVar[Strategy] = _ZERO1


class ZeRO1Optimizer(ShardedOptimizer):
    """The user's optimizer, stepped on this rank's share of the parameters. The parameters updated
    by other ranks are gathered after the step."""


class ZeRO2Model(ShardedModel):
    """A model with gradients and optimizer state sharded across ranks, in the same buckets as under
    zero1. Memory per rank: P + (G + O)/N bytes (P: parameters, G: gradients, O: optimizer state, N:
    number of ranks) and one bucket. With micro-batches, gradients are reduce-scattered for each
    micro-batch."""

    declaration: ClassVar[Strategy] = _ZERO2


class ZeRO2Optimizer(ShardedOptimizer):
    """The user's optimizer, stepped on this rank's share of the parameters. The parameters updated
    by other ranks are gathered after the step."""


class ZeRO3Model(ShardedModel):
    """A model with parameters, gradients and optimizer state sharded across ranks. Memory per rank:
    (P + G + O)/N bytes (P: parameters, G: gradients, O: optimizer state, N: number of ranks), plus
    two of the largest blocks."""

    declaration: ClassVar[Strategy] = _ZERO3


class ZeRO3Optimizer(ShardedOptimizer):
    """The user's optimizer, stepped on this rank's shard."""


class FSDPModel(ShardedModel):
    """A model with parameters, gradients and optimizer state sharded across ranks, as with
    zero3."""

    declaration: ClassVar[Strategy] = _FSDP


class FSDPOptimizer(ShardedOptimizer):
    """The user's optimizer, stepped on this rank's shard."""


class HSDPModel(ShardedModel):
    """A model with several replicas. Each replica's parameters, gradients and optimizer state are
    sharded across its ranks. Memory per rank: (P + G + O)/S bytes (P: parameters, G: gradients, O:
    optimizer state, S: number of ranks in a replica), plus two of the largest blocks.

    `shard_size`: number of ranks in a replica. None: the number of ranks on the largest host. If
    the world size is not a multiple of it, for example after a failure, the next larger divisor of
    the world size is used.
    """

    declaration: ClassVar[Strategy] = _HSDP


class HSDPOptimizer(ShardedOptimizer):
    """The user's optimizer, stepped on this rank's shard."""
