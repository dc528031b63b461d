"""ZeRO stage 3: parameters, gradients and optimizer state are cut over the ranks; a block is whole only while it computes.

Per rank: (P+G+O)/N bytes and the largest blocks, two at a time; 3P(N-1)/N bytes sent per step (parameters are gathered for the forward and
again for the backward pass, gradients reduce-scattered). (Rajbhandari et al., "ZeRO", SC 2020, sections 5.3 and 7.2.)
"""

from __future__ import annotations

from typing import ClassVar

from shoal_worker.engine.parameter_groups import ParameterGroup, by_modules
from shoal_worker.sharding.unit import Stage
from shoal_worker.strategies.sharded import ShardedParametersModel
from shoal_worker.strategies.sharded_optimizer import ShardedParametersOptimizer


class ZeRO3Model(ShardedParametersModel):
    """Parameters, gradients and optimizer state are cut over the ranks."""

    strategy: ClassVar[str] = "zero3"
    stage: ClassVar[Stage] = Stage.PARAMETERS
    settings: ClassVar[frozenset[str]] = ShardedParametersModel.settings | {"shard_modules"}

    def groups(self) -> list[ParameterGroup]:
        """Blocks: one is whole in memory while it computes."""
        return by_modules(self.module, self.config.shard_modules, at_least=self.config.minimum_parameter_group_size)


class ZeRO3Optimizer(ShardedParametersOptimizer):
    """The user's optimizer, stepped on this rank's shard."""
