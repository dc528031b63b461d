"""ZeRO stage 1: every rank holds all parameters and gradients, and the optimizer state of its share of them.

Per rank: P + G + O/N bytes, and 2P(N-1)/N bytes sent per step (gradients are reduce-scattered, updated parameters all-gathered), which is
what ddp sends. (Rajbhandari et al., "ZeRO", SC 2020, section 5.1.)
"""

from __future__ import annotations

from typing import ClassVar

from shoal_worker.engine.parameter_groups import ParameterGroup, by_bytes
from shoal_worker.sharding.unit import Stage
from shoal_worker.strategies.sharded import ShardedParametersModel
from shoal_worker.strategies.sharded_optimizer import ShardedParametersOptimizer


class ZeRO1Model(ShardedParametersModel):
    """Optimizer state is cut over the ranks."""

    strategy: ClassVar[str] = "zero1"
    stage: ClassVar[Stage] = Stage.OPTIMIZER

    def groups(self) -> list[ParameterGroup]:
        """Buckets: reduced as soon as the backward pass has filled them."""
        return by_bytes(self.module, self.config.bucket_cap_mb << 20)


class ZeRO1Optimizer(ShardedParametersOptimizer):
    """The user's optimizer, stepped on this rank's share of the parameters; the others are fetched."""
