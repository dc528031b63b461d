"""Pipeline x tensor x data: replicas of the model, each cut into pipeline stages whose layers are split over ranks.

Memory and bytes are the product and the sum of the three: docs/strategies/hybrid.md.
"""

from __future__ import annotations

import functools
from typing import ClassVar, Final

from shoal_common.errors import ConfigurationError

from shoal_worker.engine.parameter_groups import by_modules
from shoal_worker.mesh.axes import Axes
from shoal_worker.mesh.division import Sharding
from shoal_worker.sharding.unit import Stage
from shoal_worker.strategies.divided import PIPELINE_OPTIONS, TENSOR_OPTIONS
from shoal_worker.strategies.mesh import MeshModel
from shoal_worker.strategies.pipeline import PipelineOptimizer
from shoal_worker.strategies.tensor import checked_size

_ALONG_DATA: Final = {"ddp": None, "zero1": Stage.OPTIMIZER, "zero2": Stage.GRADIENTS, "fsdp": Stage.PARAMETERS}
_SIZES = frozenset({"pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size"})


class HybridShardedModel(MeshModel):
    """`pipeline_parallel_size` x `tensor_parallel_size` ranks hold a replica; `data_parallel_size`: the most; -1: as many as there can be.

    `data_parallel_strategy`: "ddp", replicas hold their own gradients and optimizer state; "zero1", each holds a share of the optimizer
    state; "zero2", and of the summed gradients; "fsdp", and of the parameters, which are gathered for the passes: block by block, or in a
    pipeline all of a rank's stages. (Rajbhandari et al., "ZeRO", SC 2020, section 5.)
    """

    strategy: ClassVar[str] = "hybrid"
    settings: ClassVar[frozenset[str]] = frozenset({"shard_modules"})
    options: ClassVar[frozenset[str]] = _SIZES | TENSOR_OPTIONS | PIPELINE_OPTIONS | {"data_parallel_strategy"}

    def initialize_sharding(self) -> None:
        """See `MeshModel`."""
        along_data = self._options.get("data_parallel_strategy", "ddp")
        if along_data not in list(_ALONG_DATA):
            raise ConfigurationError(f"data_parallel_strategy={along_data!r}: expected one of {', '.join(_ALONG_DATA)}")
        if self.config.shard_modules is not None and (along_data != "fsdp" or self.pipelined):
            raise ConfigurationError(
                f"shard_modules={self.config.shard_modules!r} with data_parallel_strategy={along_data!r} and pipeline_parallel_size="
                f'{self._size("pipeline_parallel_size")}: only "fsdp" without a pipeline gathers parameters by modules; leave it out'
            )
        if self.pipelined and self._options.get("sequence_dimension") is not None:
            raise ConfigurationError(
                f"sequence_dimension={self._options['sequence_dimension']} with pipeline_parallel_size="
                f"{self._size('pipeline_parallel_size')}: what stages hand on is whole; leave one of the two out"
            )
        super().initialize_sharding()
        if self.sharding is not None and self.sharding.blocks is not None:
            self.sharding.blocks(self._template.module)

    @property
    def pipelined(self) -> bool:
        """See `MeshModel`."""
        return self._size("pipeline_parallel_size") > 1

    @property
    def _any_optimizer(self) -> bool:
        return (self._size("tensor_parallel_size") == 1 and self.sharding is None) or super()._any_optimizer

    @property
    def sharding(self) -> Sharding | None:
        """See `MeshModel`."""
        stage = _ALONG_DATA[self._options.get("data_parallel_strategy", "ddp")]
        if stage is None:
            return None
        blocks = None
        if stage is Stage.PARAMETERS and not self.pipelined:
            blocks = functools.partial(
                by_modules, shard_modules=self.config.shard_modules, at_least=self.config.minimum_parameter_group_size
            )
        return Sharding(stage=stage, bucket_bytes=self.config.bucket_cap_mb << 20, blocks=blocks)

    def axes_for(self, world_size: int) -> Axes:
        """See `MeshModel`."""
        pipeline, tensor = self._size("pipeline_parallel_size"), self._size("tensor_parallel_size")
        possible, wanted = world_size // (pipeline * tensor), self._options.get("data_parallel_size", -1)
        data = possible if wanted == -1 else min(possible, checked_size("data_parallel_size", wanted))
        return Axes(pipeline=pipeline, tensor=tensor, data=data)

    def _size(self, option: str) -> int:
        return checked_size(option, self._options.get(option, 1))


class HybridShardedOptimizer(PipelineOptimizer):
    """The user's optimizer, stepped on what this rank holds of its replica."""
