"""Tensor parallelism: every layer's weights are split over the ranks, which all work on the same batch.

Per rank: split layers 1/N; 2 all-reduces of activations a transformer block and direction. (Shoeybi et al., "Megatron-LM", 2019, section 3;
decisions 0100 to 0104.) What is split and how is a plan: docs/strategies/tensor.md.
"""

from __future__ import annotations

from typing import ClassVar

from shoal_worker.engine.base import Setup
from shoal_worker.mesh.axes import Axes
from shoal_worker.mesh.blueprint import TENSOR_OPTIONS
from shoal_worker.mesh.engine import MeshEngine
from shoal_worker.mesh.layouts import Fits, MeshPlan, checked_size, first_that_fits
from shoal_worker.strategies.declaration import Strategy
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.optimizer import ShardedOptimizer


def _engine(setup: Setup) -> MeshEngine:
    """Without a size the axis is the largest that the plan allows: at the start it has to be the number of ranks."""
    size = setup.options.get("tensor_parallel_size")

    def axes(world_size: int, fits: Fits) -> Axes:
        if size is not None:
            return Axes(pipeline=1, tensor=checked_size("tensor_parallel_size", size), data=world_size // size)
        return first_that_fits((Axes(pipeline=1, tensor=n, data=world_size // n) for n in range(world_size, 0, -1)), fits)

    def all_ranks(world_size: int) -> Axes:
        return Axes(pipeline=1, tensor=world_size, data=1)

    given = "tensor_parallel_size" in setup.options
    return MeshEngine(setup, MeshPlan(axes_for=axes, axes_at_start=None if given else all_ranks, pipelined=False, cuts_parameters=True))


class TensorParallelModel(ShardedModel):
    """Layers are split over all ranks, or over `tensor_parallel_size` of them; what is left makes further replicas."""

    declaration: ClassVar[Strategy] = Strategy(
        name="tensor",
        engine=_engine,
        memory="(P + G + O)/N of split layers",
        sent="2 all-reduces of activations a block and direction",
        a_death="loses nothing with a second replica; else back to the checkpoint",
        options=TENSOR_OPTIONS | {"tensor_parallel_size"},
    )


class TensorParallelOptimizer(ShardedOptimizer):
    """The user's optimizer, stepped on this rank's part of each layer."""
