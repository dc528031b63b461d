"""Pipeline x tensor x data parallelism. Each replica of the model is divided into pipeline stages,
and each stage's layers are split across ranks.

Memory per rank is divided by the pipeline and tensor sizes. State that `data_parallel_strategy`
shards is also divided by the data-parallel size. The traffic of the three kinds of parallelism adds
up (docs/strategies/hybrid.md).
"""

from __future__ import annotations

import functools
from typing import ClassVar, Final

from shoal_common.errors import ConfigurationError

from shoal_worker.engine.base import Setup
from shoal_worker.engine.state.parameter_groups import by_modules
from shoal_worker.mesh.engine import MeshEngine
from shoal_worker.mesh.layouts import (
    PIPELINE_OPTIONS,
    TENSOR_OPTIONS,
    Axes,
    Fits,
    MeshPlan,
    Sharding,
    checked_size,
)
from shoal_worker.sharding.unit import Stage
from shoal_worker.strategies.declaration import Strategy
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.optimizer import ShardedOptimizer
from shoal_worker.torch_internals import needs_torch

_ALONG_DATA: Final = {
    "ddp": None,
    "zero1": Stage.OPTIMIZER,
    "zero2": Stage.GRADIENTS,
    "fsdp": Stage.PARAMETERS,
}
_SIZES: Final = frozenset({"pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size"})


def _engine(setup: Setup) -> MeshEngine:
    options, config = setup.options, setup.config
    data_axis = options.get("data_parallel_strategy", "ddp")
    if data_axis not in list(_ALONG_DATA):
        raise ConfigurationError(
            f"data_parallel_strategy={data_axis!r}: expected one of {', '.join(_ALONG_DATA)}"
        )
    pipeline = checked_size("pipeline_parallel_size", options.get("pipeline_parallel_size", 1))
    pipelined = pipeline > 1
    if pipelined and setup.several:
        raise ConfigurationError(
            f"pipeline_parallel_size={pipeline} with several models: train_step runs the forward "
            "and backward passes of one pipeline together, so a loss cannot depend on two models; "
            "leave pipeline_parallel_size out and split the models by tensor_parallel_size alone, "
            "or combine them into one nn.Module with one optimizer"
        )
    for field in ("shard_modules", "prefetch_blocks"):
        value = getattr(config, field)
        if value is not None and (data_axis != "fsdp" or pipelined):
            raise ConfigurationError(
                f"{field}={value!r} with data_parallel_strategy={data_axis!r} and "
                f'pipeline_parallel_size={pipeline}: only "fsdp" without a pipeline gathers '
                f"parameters module by module; leave {field} out"
            )
    if pipelined and options.get("sequence_dimension") is not None:
        raise ConfigurationError(
            f"sequence_dimension={options['sequence_dimension']} with "
            f"pipeline_parallel_size={pipeline}: pipeline stages exchange full activations, which "
            "sequence parallelism would split; leave one of the two out"
        )
    tensor = checked_size("tensor_parallel_size", options.get("tensor_parallel_size", 1))
    if tensor > 1:
        needs_torch(
            2,
            12,
            f"tensor_parallel_size={tensor}",
            "leave it out, and use pipeline_parallel_size or data_parallel_strategy='fsdp'",
        )
    wanted = options.get("data_parallel_size", -1)

    def axes(world_size: int, fits: Fits) -> Axes:
        possible = world_size // (pipeline * tensor)
        return Axes(
            pipeline=pipeline,
            tensor=tensor,
            data=possible
            if wanted == -1
            else min(possible, checked_size("data_parallel_size", wanted)),
        )

    sharding = _sharding(setup, _ALONG_DATA[data_axis], pipelined=pipelined)
    plan = MeshPlan(
        axes_for=axes,
        pipelined=pipelined,
        cuts_parameters=tensor > 1 or sharding is not None,
        sharding=sharding,
    )
    return MeshEngine(setup, plan)


def _sharding(setup: Setup, stage: Stage | None, *, pipelined: bool) -> Sharding | None:
    """Returns the sharding along the data axis; None if nothing is sharded."""
    if stage is None:
        return None
    config, blocks = setup.config, None
    if stage is Stage.PARAMETERS and not pipelined:
        blocks = functools.partial(
            by_modules,
            shard_modules=config.shard_modules,
            at_least=config.minimum_parameter_group_size,
        )
    return Sharding(
        stage=stage,
        bucket_bytes=config.bucket_cap_mb << 20,
        blocks=blocks,
        prefetch=config.blocks_ahead,
    )


class HybridShardedModel(ShardedModel):
    """A model with replicas that span `pipeline_parallel_size` x `tensor_parallel_size` ranks.
    `data_parallel_size`: maximum number of replicas; -1: as many as possible.

    `data_parallel_strategy`: what is sharded across the replicas. "ddp": nothing; each replica has
    all parameters, gradients and optimizer state. "zero1" shards the optimizer state across the
    replicas, "zero2" also the summed gradients, and "fsdp" also the parameters. "fsdp" gathers the
    parameters for each pass, either block by block or, in a pipeline, for all stages of a rank
    together. (Rajbhandari et al., "ZeRO", SC 2020, section 5.)
    """

    declaration: ClassVar[Strategy] = Strategy(
        name="hybrid",
        engine=_engine,
        memory="(P + G + O)/(p t); with zero2 along d: (P + (G + O)/d)/(p t); with fsdp: "
        "(P + G + O)/(p t d) and the gathered blocks",
        sent="the sum of tensor's, pipeline's and 2(P/(p t))(d-1)/d",
        a_death="as tensor",
        options=_SIZES | TENSOR_OPTIONS | PIPELINE_OPTIONS | {"data_parallel_strategy"},
        settings=frozenset({"shard_modules", "prefetch_blocks"}),
        several_models=True,
    )


class HybridShardedOptimizer(ShardedOptimizer):
    """The user's optimizer, stepped on this rank's part of its replica."""
