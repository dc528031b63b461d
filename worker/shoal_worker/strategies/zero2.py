"""ZeRO stage 2: every rank holds all parameters, and the gradients and the optimizer state of its
share of them.

Per rank: P + (G+O)/N bytes and one bucket; 2P(N-1)/N bytes sent per step. With micro-batches the
gradients are reduce-scattered for each. (Rajbhandari et al., "ZeRO", SC 2020, section 5.2.)
"""

from __future__ import annotations

import functools
from typing import ClassVar

from shoal_worker.sharding.engine import OPTIONS, SETTINGS, ShardedEngine, in_buckets
from shoal_worker.sharding.unit import Stage
from shoal_worker.strategies.declaration import Strategy
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.optimizer import ShardedOptimizer


class ZeRO2Model(ShardedModel):
    """Gradients and optimizer state are sharded over the ranks, in zero1's buckets."""

    declaration: ClassVar[Strategy] = Strategy(
        name="zero2",
        engine=functools.partial(ShardedEngine, stage=Stage.GRADIENTS, groups=in_buckets),
        memory="P + (G + O)/N",
        sent="2P(N-1)/N",
        a_death="loses nothing: its shard is mirrored",
        options=OPTIONS,
        settings=SETTINGS,
        compressor="topk",
        communicates_in_passes=True,
        several_models=True,
    )


class ZeRO2Optimizer(ShardedOptimizer):
    """The user's optimizer, stepped on this rank's share of the parameters; the others are
    fetched."""
