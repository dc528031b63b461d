"""ZeRO stage 1: every rank holds all parameters and gradients, and the optimizer state of its share
of them.

Per rank: P + G + O/N bytes, and 2P(N-1)/N bytes sent per step (gradients are reduce-scattered,
updated parameters all-gathered), which is what ddp sends. (Rajbhandari et al., "ZeRO", SC 2020,
section 5.1.)
"""

from __future__ import annotations

import functools
from typing import ClassVar

from shoal_worker.sharding.engine import OPTIONS, SETTINGS, ShardedEngine, in_buckets
from shoal_worker.sharding.unit import Stage
from shoal_worker.strategies.declaration import Strategy
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.optimizer import ShardedOptimizer


class ZeRO1Model(ShardedModel):
    """Optimizer state is sharded over the ranks."""

    declaration: ClassVar[Strategy] = Strategy(
        name="zero1",
        engine=functools.partial(ShardedEngine, stage=Stage.OPTIMIZER, groups=in_buckets),
        memory="P + G + O/N",
        sent="2P(N-1)/N",
        a_death="loses nothing: its shard is mirrored",
        options=OPTIONS,
        settings=SETTINGS,
        compressor="topk",
        communicates_in_passes=True,
        several_models=True,
    )


class ZeRO1Optimizer(ShardedOptimizer):
    """The user's optimizer, stepped on this rank's share of the parameters; the others are
    fetched."""
