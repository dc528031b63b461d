"""ZeRO stage 3: parameters, gradients and optimizer state are sharded over the ranks; a block is
whole only while it computes.

Per rank: (P+G+O)/N bytes and the largest blocks, two at a time; 3P(N-1)/N bytes sent per step
(parameters are gathered for the forward and again for the backward pass, gradients
reduce-scattered). (Rajbhandari et al., "ZeRO", SC 2020, sections 5.3 and 7.2.)
"""

from __future__ import annotations

import functools
from typing import ClassVar

from shoal_worker.sharding.engine import OPTIONS, SETTINGS, ShardedEngine, in_blocks
from shoal_worker.sharding.unit import Stage
from shoal_worker.strategies.declaration import Strategy
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.optimizer import ShardedOptimizer


class ZeRO3Model(ShardedModel):
    """Parameters, gradients and optimizer state are sharded over the ranks."""

    declaration: ClassVar[Strategy] = Strategy(
        name="zero3",
        engine=functools.partial(ShardedEngine, stage=Stage.PARAMETERS, groups=in_blocks),
        memory="(P + G + O)/N + two blocks",
        sent="3P(N-1)/N",
        a_death="loses nothing: its shard is mirrored",
        options=OPTIONS,
        settings=SETTINGS | {"shard_modules", "prefetch_blocks"},
        compressor="topk",
        communicates_in_passes=True,
        several_models=True,
    )


class ZeRO3Optimizer(ShardedOptimizer):
    """The user's optimizer, stepped on this rank's shard."""
