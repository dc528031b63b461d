"""ZeRO stage 2: every rank holds all parameters, and the gradients and the optimizer state of its share of them.

Per rank: P + (G+O)/N bytes and one bucket; 2P(N-1)/N bytes sent per step. With micro-batches the gradients are reduce-scattered for each.
(Rajbhandari et al., "ZeRO", SC 2020, section 5.2.)
"""

from __future__ import annotations

from typing import ClassVar

from shoal_worker.sharding.partition import Group, by_bytes
from shoal_worker.sharding.unit import Stage
from shoal_worker.strategies.sharded import ShardedParametersModel, ShardedParametersOptimizer


class ZeRO2Model(ShardedParametersModel):
    """Gradients and optimizer state are cut over the ranks."""

    strategy: ClassVar[str] = "zero2"
    stage: ClassVar[Stage] = Stage.GRADIENTS

    def groups(self) -> list[Group]:
        """Buckets: reduced as soon as the backward pass has filled them."""
        return by_bytes(self.module, self.config.bucket_cap_mb << 20)


class ZeRO2Optimizer(ShardedParametersOptimizer):
    """See the module."""
