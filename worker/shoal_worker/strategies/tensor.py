"""Tensor parallelism. The weights of layers are split across the ranks, which all process the same
batch.

Cost per rank: memory for 1/N of the split layers; 2 all-reduces of activations per transformer
block in the forward pass, and 2 in the backward pass. (Shoeybi et al., "Megatron-LM", 2019, section
3; docs/explanation/mesh.md#tensor-parallelism.) A plan determines which layers are split, and how:
docs/strategies/tensor.md.
"""

from __future__ import annotations

from typing import ClassVar

from shoal_worker.engine.base import Setup
from shoal_worker.mesh.engine import MeshEngine
from shoal_worker.mesh.layouts import TENSOR_OPTIONS, Axes, plan_along
from shoal_worker.strategies.declaration import Strategy
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.optimizer import ShardedOptimizer
from shoal_worker.torch_internals import needs_torch


def _engine(setup: Setup) -> MeshEngine:
    needs_torch(2, 12, "strategy='tensor'", "use zero3 or fsdp")
    plan = plan_along(
        "tensor_parallel_size",
        setup.options,
        lambda size, replicas: Axes(pipeline=1, tensor=size, data=replicas),
        pipelined=False,
        cuts_parameters=True,
    )
    return MeshEngine(setup, plan)


class TensorParallelModel(ShardedModel):
    """A model whose layers are split across all ranks, or across `tensor_parallel_size` ranks if
    that is set. Additional ranks form further replicas."""

    declaration: ClassVar[Strategy] = Strategy(
        name="tensor",
        engine=_engine,
        memory="(P + G + O)/N for tensor-parallel layers",
        sent="2 all-reduces of activations per block per direction",
        a_death="nothing is lost if there is a second replica; otherwise the run returns to its "
        "checkpoint",
        options=TENSOR_OPTIONS | {"tensor_parallel_size"},
        several_models=True,
    )


class TensorParallelOptimizer(ShardedOptimizer):
    """The user's optimizer, stepped on this rank's part of each layer."""
