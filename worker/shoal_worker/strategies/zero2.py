"""ZeRO stage 2: every rank holds all parameters, and the gradients and the optimizer state of its share of them.

Per rank: P + (G+O)/N bytes and one bucket; 2P(N-1)/N bytes sent per step. With micro-batches the gradients are reduce-scattered for each.
(Rajbhandari et al., "ZeRO", SC 2020, section 5.2.)
"""

from __future__ import annotations

from typing import ClassVar

from shoal_worker.sharding.unit import Stage
from shoal_worker.strategies.sharded_optimizer import ShardedParametersOptimizer
from shoal_worker.strategies.zero1 import ZeRO1Model


class ZeRO2Model(ZeRO1Model):
    """Gradients and optimizer state are cut over the ranks, in zero1's buckets."""

    strategy: ClassVar[str] = "zero2"
    stage: ClassVar[Stage] = Stage.GRADIENTS


class ZeRO2Optimizer(ShardedParametersOptimizer):
    """The user's optimizer, stepped on this rank's share of the parameters; the others are fetched."""
