"""The strategies by name. Adding one is a file and a line here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shoal_common.errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shoal_worker.config import ShardingConfiguration
    from shoal_worker.elastic.session import Session
    from shoal_worker.strategies.base import ShardedModel
    from shoal_worker.strategies.base_optimizer import ShardedOptimizer

_STRATEGIES = {
    "ddp": ("shoal_worker.strategies.ddp", "DDPModel", "DDPOptimizer"),
    "fsdp": ("shoal_worker.strategies.fsdp", "FSDPModel", "FSDPOptimizer"),
    "hsdp": ("shoal_worker.strategies.hsdp", "HSDPModel", "HSDPOptimizer"),
    "zero1": ("shoal_worker.strategies.zero1", "ZeRO1Model", "ZeRO1Optimizer"),
    "zero2": ("shoal_worker.strategies.zero2", "ZeRO2Model", "ZeRO2Optimizer"),
    "zero3": ("shoal_worker.strategies.zero3", "ZeRO3Model", "ZeRO3Optimizer"),
    "tensor": ("shoal_worker.strategies.tensor", "TensorParallelModel", "TensorParallelOptimizer"),
    "pipeline": ("shoal_worker.strategies.pipeline", "PipelineParallelModel", "PipelineParallelOptimizer"),
    "hybrid": ("shoal_worker.strategies.hybrid", "HybridShardedModel", "HybridShardedOptimizer"),
    "local_sgd": ("shoal_worker.strategies.local_sgd", "LocalSGDModel", "LocalSGDOptimizer"),
    "async_sgd": ("shoal_worker.strategies.async_sgd", "AsyncSGDModel", "AsyncSGDOptimizer"),
}


def names() -> tuple[str, ...]:
    """All strategies."""
    return tuple(_STRATEGIES)


def find(name: str) -> tuple[type[ShardedModel], type[ShardedOptimizer]]:
    """The model and optimizer classes of a strategy.

    Raises:
        ConfigurationError: there is none of that name.
    """
    if not isinstance(name, str) or name not in _STRATEGIES:
        raise ConfigurationError(f"strategy={name!r}: expected one of {', '.join(_STRATEGIES)}")
    module_name, model, optimizer = _STRATEGIES[name]
    module = importlib.import_module(module_name)
    return getattr(module, model), getattr(module, optimizer)


def build(
    model_class: type[ShardedModel],
    optimizer_class: type[ShardedOptimizer],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    session: Session,
    config: ShardingConfiguration,
    *,
    backend: str | None,
    options: dict[str, Any],
) -> tuple[ShardedModel, ShardedOptimizer | None]:
    """Makes the two halves of a strategy and joins them to the session.

    Raises:
        ConfigurationError: options that the strategy does not know, or values that cannot work.
    """
    unknown = sorted(set(options) - set(model_class.options))
    if unknown:
        known = ", ".join(sorted(model_class.options)) or "none of its own"
        raise ConfigurationError(
            f"strategy {model_class.strategy!r} does not know {unknown}; its options: {known}, and those of ShardingConfiguration"
        )
    distributed = model_class(model, session, config, backend=backend, **options)
    wrapped = optimizer_class(optimizer, distributed, session) if optimizer is not None else None
    distributed.attach(optimizer)
    return distributed, wrapped
