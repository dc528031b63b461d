"""Pipeline parallelism. The model is divided into stages of consecutive layers. Each stage is on
one rank, and a batch passes through the stages in micro-batches.

Cost per rank: memory for the stage's share of parameters, gradients and optimizer state, and for
the activations of the micro-batches in flight. Activations and their gradients are sent between
stages. (Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream-2BW"/1F1B, ICML 2021; Qi
et al., "Zero Bubble", ICLR 2024; docs/explanation/mesh.md#pipelines.) See
docs/strategies/pipeline.md.
"""

from __future__ import annotations

from typing import ClassVar

from shoal_worker.engine.base import Setup
from shoal_worker.mesh.engine import MeshEngine
from shoal_worker.mesh.layouts import PIPELINE_OPTIONS, Axes, plan_along
from shoal_worker.strategies.declaration import Strategy
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.optimizer import ShardedOptimizer


def _engine(setup: Setup) -> MeshEngine:
    plan = plan_along(
        "pipeline_parallel_size",
        setup.options,
        lambda size, replicas: Axes(pipeline=size, tensor=1, data=replicas),
        pipelined=True,
        cuts_parameters=False,
    )
    return MeshEngine(setup, plan)


class PipelineParallelModel(ShardedModel):
    """A model whose stages are distributed across all ranks, or across `pipeline_parallel_size`
    ranks if that is set. Additional ranks form further replicas."""

    declaration: ClassVar[Strategy] = Strategy(
        name="pipeline",
        engine=_engine,
        memory="the stage's part of P + G + O, and micro-batches in flight",
        sent="activations between stages",
        a_death="as tensor",
        options=PIPELINE_OPTIONS | {"pipeline_parallel_size"},
        why_one_model="train_step runs the forward and backward passes of the stages together, so "
        "a loss cannot depend on two models. For models that are too large for one rank, use "
        "tensor or zero3",
    )


class PipelineParallelOptimizer(ShardedOptimizer):
    """The user's optimizer, stepped on the parameters of this rank's stages."""
