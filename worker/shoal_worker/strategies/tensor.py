"""Tensor parallelism: every layer's weights are split over the ranks, which all work on the same batch.

Per rank: split layers 1/N; 2 all-reduces of activations a transformer block and direction. (Shoeybi et al., "Megatron-LM", 2019, section 3;
decisions 0100 to 0104.) What is split and how is a plan: docs/strategies/tensor.md.
"""

from __future__ import annotations

from typing import ClassVar

from shoal_common.errors import ConfigurationError

from shoal_worker.mesh.axes import Axes
from shoal_worker.strategies.divided import TENSOR_OPTIONS
from shoal_worker.strategies.mesh import MeshModel
from shoal_worker.strategies.sharded_optimizer import ShardedParametersOptimizer


class TensorParallelModel(MeshModel):
    """Layers are split over all ranks, or over `tensor_parallel_size` of them; what is left makes further replicas."""

    strategy: ClassVar[str] = "tensor"
    options: ClassVar[frozenset[str]] = TENSOR_OPTIONS | {"tensor_parallel_size"}

    @property
    def pipelined(self) -> bool:
        """See `MeshModel`."""
        return False

    def axes_for(self, world_size: int) -> Axes:
        """See `MeshModel`. Without a size it is the largest that the plan allows: at the start the number of ranks."""
        given = self._options.get("tensor_parallel_size")
        if given is not None:
            return Axes(pipeline=1, tensor=checked_size("tensor_parallel_size", given), data=world_size // given)
        return self._most_cut(Axes(pipeline=1, tensor=size, data=world_size // size) for size in range(world_size, 0, -1))

    def _check_divisible(self) -> None:
        if (
            "tensor_parallel_size" not in self._options
        ):  # what cannot be split so is refused; after a death the best is made of what is left
            self._held.blueprint_for(Axes(pipeline=1, tensor=self._session.world_size, data=1))
        super()._check_divisible()


class TensorParallelOptimizer(ShardedParametersOptimizer):
    """The user's optimizer, stepped on this rank's part of each layer."""


def checked_size(option: str, value: object) -> int:
    """Raises ConfigurationError: not a number of ranks."""
    if not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{option}={value!r}: expected a number of ranks, at least 1")
    return value
