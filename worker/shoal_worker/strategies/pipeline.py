"""Pipeline parallelism: the model is cut into stages, one run of layers a rank, and each batch goes through them in micro-batches.

Per rank: the stage's share of parameters, gradients and optimizer state, and the activations of the micro-batches in flight; activations
and their gradients are sent at the borders. (Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream-2BW"/1F1B, ICML 2021; Qi
et al., "Zero Bubble", ICLR 2024; decisions 0105 to 0107.) See docs/strategies/pipeline.md.
"""

from __future__ import annotations

from typing import ClassVar

from shoal_common.errors import ConfigurationError

from shoal_worker.elastic.contract import StepStatus
from shoal_worker.mesh.axes import Axes
from shoal_worker.strategies.divided import PIPELINE_OPTIONS
from shoal_worker.strategies.mesh import MeshModel
from shoal_worker.strategies.sharded_optimizer import ShardedParametersOptimizer
from shoal_worker.strategies.tensor import checked_size


class PipelineParallelModel(MeshModel):
    """A stage on each rank, or on each of `pipeline_parallel_size`; what is left makes further replicas."""

    strategy: ClassVar[str] = "pipeline"
    options: ClassVar[frozenset[str]] = PIPELINE_OPTIONS | {"pipeline_parallel_size"}

    @property
    def pipelined(self) -> bool:
        """See `MeshModel`."""
        return True

    @property
    def _any_optimizer(self) -> bool:
        return True  # no parameter is cut

    def axes_for(self, world_size: int) -> Axes:
        """See `MeshModel`. Without a size it is the largest for which there are layers: at the start the number of ranks."""
        given = self._options.get("pipeline_parallel_size")
        if given is not None:
            return Axes(pipeline=checked_size("pipeline_parallel_size", given), tensor=1, data=world_size // given)
        return self._most_cut(Axes(pipeline=size, tensor=1, data=world_size // size) for size in range(world_size, 0, -1))

    def _check_divisible(self) -> None:
        if "pipeline_parallel_size" not in self._options:  # too few layers are refused; after a death the best is made of what is left
            self._held.blueprint_for(Axes(pipeline=self._session.world_size, tensor=1, data=1))
        super()._check_divisible()


class PipelineOptimizer(ShardedParametersOptimizer):
    """The user's optimizer, stepped on the parameters of this rank's stages."""

    def _finish(self) -> StepStatus:
        scaled = self._set_by_scaler("grad_scale") is not None or self._set_by_scaler("found_inf") is not None
        if scaled and self._model.pipelined:
            raise ConfigurationError(
                "a GradScaler with a pipeline: train_step takes losses through their backward passes itself, so nothing can scale them; "
                "use bfloat16, which needs none: torch.autocast(..., dtype=torch.bfloat16) around train_step"
            )
        return super()._finish()


class PipelineParallelOptimizer(PipelineOptimizer):
    """The user's optimizer, stepped on the parameters of this rank's stages."""
