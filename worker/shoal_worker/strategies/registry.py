"""The strategies by name. Adding one is a file with its declaration, and a line here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from shoal_common.errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shoal_worker.config import ShardingConfiguration
    from shoal_worker.elastic.session import Session
    from shoal_worker.strategies.declaration import Strategy
    from shoal_worker.strategies.model import ShardedModel
    from shoal_worker.strategies.optimizer import ShardedOptimizer
from shoal_worker.tables import tables_of

_STRATEGIES = {
    "ddp": ("shoal_worker.strategies.ddp", "DDPModel", "DDPOptimizer"),
    "zero1": ("shoal_worker.strategies.zero1", "ZeRO1Model", "ZeRO1Optimizer"),
    "zero2": ("shoal_worker.strategies.zero2", "ZeRO2Model", "ZeRO2Optimizer"),
    "zero3": ("shoal_worker.strategies.zero3", "ZeRO3Model", "ZeRO3Optimizer"),
    "fsdp": ("shoal_worker.strategies.fsdp", "FSDPModel", "FSDPOptimizer"),
    "hsdp": ("shoal_worker.strategies.hsdp", "HSDPModel", "HSDPOptimizer"),
    "tensor": ("shoal_worker.strategies.tensor", "TensorParallelModel", "TensorParallelOptimizer"),
    "pipeline": ("shoal_worker.strategies.pipeline", "PipelineParallelModel", "PipelineParallelOptimizer"),
    "hybrid": ("shoal_worker.strategies.hybrid", "HybridShardedModel", "HybridShardedOptimizer"),
    "local_sgd": ("shoal_worker.strategies.local_sgd", "LocalSGDModel", "LocalSGDOptimizer"),
    "async_sgd": ("shoal_worker.strategies.async_sgd", "AsyncSGDModel", "AsyncSGDOptimizer"),
}

_INSTEAD: Final = {
    "param_dtype": "compute within torch.autocast, or take {known}",
    "reduce_dtype": 'use gradient_compression="bf16", or take {known}',
    "offload": "take {known}, whose optimizer state is in shards",
    "shard_modules": "take {known}, which gather parameters by modules, or leave it out",
}
"""Settings that not every strategy knows, and what to do instead."""


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


def declarations() -> list[Strategy]:
    """What all strategies declare."""
    return [find(name)[0].declaration for name in _STRATEGIES]


def compressor_for(name: str) -> str | None:
    """The compressor that suits a strategy over slow links; None: it takes none, or there is no such strategy."""
    return find(name)[0].declaration.compressor if name in _STRATEGIES else None


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
    strategy = model_class.declaration
    unknown = sorted(set(options) - strategy.options)
    if unknown:
        known = ", ".join(sorted(strategy.options)) or "none of its own"
        raise ConfigurationError(
            f"strategy {strategy.name!r} does not know {unknown}; its options: {known}, and those of ShardingConfiguration"
        )
    _check(strategy, model, config)
    distributed = model_class(model, session, config, backend=backend, **options)
    wrapped = optimizer_class(optimizer, distributed, session) if optimizer is not None else None
    distributed.engine.attach(optimizer)
    return distributed, wrapped


def _check(strategy: Strategy, module: nn.Module, config: ShardingConfiguration) -> None:
    """Raises ConfigurationError: a setting, or a parameter, that the strategy does not know."""
    name = strategy.name
    if config.compressor is not None and strategy.compressor is None:
        compress = _those(lambda other: other.compressor is not None)
        raise ConfigurationError(
            f"gradient_compression={config.compressor.name!r} with strategy={name!r}, which does not compress: take {compress}, or leave "
            "it out"
        )
    for field, instead in _INSTEAD.items():
        value = getattr(config, field)
        if value is not None and field not in strategy.settings:
            raise ConfigurationError(
                f"{field}={value!r} with strategy={name!r}, which does not know it: {instead.format(known=_those_that_know(field))}"
            )
    if (tables := tables_of(module)) and not strategy.sparse_tables:
        raise ConfigurationError(
            f"the model has the sparse table {tables[0].name!r}, whose rows are on parameter servers, and strategy={name!r} knows none: "
            f"take {_those(lambda other: other.sparse_tables)}, or torch.nn.Embedding"
        )
    for parameter_name, parameter in module.named_parameters() if not strategy.complex_parameters else ():
        if parameter.requires_grad and parameter.is_complex():
            raise ConfigurationError(
                f"parameter {parameter_name!r} is complex, and strategy={name!r} sums real numbers: keep it as two real ones "
                f"(torch.view_as_complex in the forward pass), or take {_those(lambda other: other.complex_parameters)}"
            )


def _those_that_know(setting: str) -> str:
    return _those(lambda strategy: setting in strategy.settings)


def _those(fit: Callable[[Strategy], bool]) -> str:
    """The strategies that fit, for an error: "zero1, zero2 or fsdp"."""
    fitting = [strategy.name for strategy in declarations() if fit(strategy)]
    return " or ".join(filter(None, (", ".join(fitting[:-1]), fitting[-1])))
