"""Registry of the strategies by name. To add a strategy, declare it in a module of this package and
add an entry to `_STRATEGIES`."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from shoal_common.errors import ConfigurationError
from torch import nn

if TYPE_CHECKING:
    import torch

    from shoal_worker.config import ShardingConfiguration
    from shoal_worker.elastic.session.session import Session
    from shoal_worker.features.model_session import ModelSession
    from shoal_worker.strategies.declaration import Strategy
    from shoal_worker.strategies.model import ShardedModel
    from shoal_worker.strategies.optimizer import ShardedOptimizer
from shoal_worker.sparse_tables.embedding import tables_of

_log = logging.getLogger(__name__)

_STRATEGIES = {
    "ddp": ("shoal_worker.strategies.ddp", "DDPModel", "DDPOptimizer"),
    "zero1": ("shoal_worker.strategies.sharded", "ZeRO1Model", "ZeRO1Optimizer"),
    "zero2": ("shoal_worker.strategies.sharded", "ZeRO2Model", "ZeRO2Optimizer"),
    "zero3": ("shoal_worker.strategies.sharded", "ZeRO3Model", "ZeRO3Optimizer"),
    "fsdp": ("shoal_worker.strategies.sharded", "FSDPModel", "FSDPOptimizer"),
    "hsdp": ("shoal_worker.strategies.sharded", "HSDPModel", "HSDPOptimizer"),
    "tensor": ("shoal_worker.strategies.tensor", "TensorParallelModel", "TensorParallelOptimizer"),
    "pipeline": (
        "shoal_worker.strategies.pipeline",
        "PipelineParallelModel",
        "PipelineParallelOptimizer",
    ),
    "hybrid": ("shoal_worker.strategies.hybrid", "HybridShardedModel", "HybridShardedOptimizer"),
    "local_sgd": ("shoal_worker.strategies.local_sgd", "LocalSGDModel", "LocalSGDOptimizer"),
    "async_sgd": ("shoal_worker.strategies.async_sgd", "AsyncSGDModel", "AsyncSGDOptimizer"),
}

_INSTEAD: Final = {
    "param_dtype": "compute under torch.autocast instead, or use {known}",
    "reduce_dtype": 'use gradient_compression="bf16", or use {known}',
    "offload": "use {known}, which shard the optimizer state",
    "mirrors": "use {known}, which mirror their shards, or leave mirrors out",
    "shard_modules": "use {known}, which gather modules one by one, or leave shard_modules out",
    "prefetch_blocks": "use {known}, which gather blocks one by one, or leave prefetch_blocks out",
}
"""Advice for the error message if a strategy does not support a setting, by name of the setting.
`{known}` stands for the strategies that support it."""


_OF_ONE_MODEL: Final[dict[str, Any]] = {"plan": Mapping, "example_inputs": (tuple, list, Mapping)}
"""Options that describe the layers of one model, with the types of their values. If several models
are trained, each has its own value."""


def names() -> tuple[str, ...]:
    """Returns the names of all strategies."""
    return tuple(_STRATEGIES)


def find(name: str) -> tuple[type[ShardedModel], type[ShardedOptimizer]]:
    """Returns the model and optimizer classes of a strategy.

    Raises:
        ConfigurationError: no strategy has this name.
    """
    if not isinstance(name, str) or name not in _STRATEGIES:
        raise ConfigurationError(f"strategy={name!r}: expected one of {', '.join(_STRATEGIES)}")
    module_name, model, optimizer = _STRATEGIES[name]
    module = importlib.import_module(module_name)
    return getattr(module, model), getattr(module, optimizer)


def declarations() -> list[Strategy]:
    """Returns the declarations of all strategies."""
    return [find(name)[0].declaration for name in _STRATEGIES]


def compressor_for(name: str) -> str | None:
    """Returns the compressor that suits a strategy on slow links; None if the strategy does not
    support compression or does not exist."""
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
    among: ModelSession | None = None,
) -> tuple[ShardedModel, ShardedOptimizer | None]:
    """Creates the model and optimizer of a strategy and attaches both to the session. `among`: this
    model's own session if several models are trained in one loop; None: it is the only model.

    Raises:
        ConfigurationError: the strategy does not support an option, or a value is invalid.
    """
    strategy = model_class.declaration
    unknown = sorted(set(options) - strategy.options)
    if unknown:
        own = f"{', '.join(sorted(strategy.options))} and " if strategy.options else ""
        raise ConfigurationError(
            f"strategy {strategy.name!r} has no options {unknown}; its options are {own}the "
            "settings of ShardingConfiguration"
        )
    check_model(strategy, model, config)
    distributed = model_class(model, session, config, backend=backend, among=among, **options)
    wrapped = optimizer_class(optimizer, distributed, session) if optimizer is not None else None
    distributed.engine.attach(optimizer)
    return distributed, wrapped


def check_several(
    strategy: Strategy, models: Sequence[nn.Module], config: ShardingConfiguration
) -> None:
    """Raises ConfigurationError unless the strategy can train these models in one loop."""
    if not config.auto_sync_gradients:
        raise ConfigurationError(
            "auto_sync_gradients=False is not supported with several models, whose gradients are "
            "always reduced during the backward pass; leave auto_sync_gradients out"
        )
    if not strategy.several_models:
        raise ConfigurationError(
            f"{len(models)} models with strategy={strategy.name!r}, which can train only one "
            f"model: {strategy.why_one_model}. Use {_those(lambda other: other.several_models)}, "
            "which can train several models, or combine the modules into one nn.Module with one "
            "optimizer"
        )
    owners: dict[int, tuple[int, str]] = {}
    for number, model in enumerate(models):
        if tables := tables_of(model):
            raise ConfigurationError(
                f"model {number} of {len(models)} has the sparse table {tables[0].name!r}, but "
                "sparse tables require a single model; use torch.nn.Embedding, or train one model"
            )
        for name, parameter in model.named_parameters():
            first, known = owners.setdefault(id(parameter), (number, name))
            if first != number:
                raise ConfigurationError(
                    f"models {first} and {number} share the parameter {known!r}, so both would "
                    "distribute and update it; keep the parameter in only one of the models"
                )


def options_of_each(options: Mapping[str, Any], models: int) -> list[dict[str, Any]]:
    """Returns the strategy's options for each of several models. An option that describes layers of
    a model must be a sequence with one value per model; all other options apply to every model.

    Raises:
        ConfigurationError: an option that describes layers does not have one value per model.
    """
    each = [
        {name: value for name, value in options.items() if name not in _OF_ONE_MODEL}
        for _ in range(models)
    ]
    for name in options.keys() & _OF_ONE_MODEL.keys():
        values, kinds = options[name], _OF_ONE_MODEL[name]
        if (
            not isinstance(values, tuple | list)
            or len(values) != models
            or not all(v is None or isinstance(v, kinds) for v in values)
        ):
            raise ConfigurationError(
                f"{name}={values!r} with {models} models: expected a tuple of {models} items, one "
                "per model in order, with None for models that need none"
            )
        for own, value in zip(each, values, strict=True):
            own.update({} if value is None else {name: value})
    return each


def why_no_whole_batch(strategy: Strategy, config: ShardingConfiguration) -> str | None:
    """Returns why `shoal.whole_batch` cannot be used in this run, with an alternative; None if it
    can be used."""
    if not strategy.communicates_in_passes:
        return (
            f"with strategy={strategy.name!r}, ranks cannot communicate during a forward or "
            f"backward pass; use {_those(lambda other: other.communicates_in_passes)}, or compute "
            "the loss of each rank's own samples"
        )
    if config.loss_reduction == "sum":
        return (
            'with loss_reduction="sum", the loss of the whole batch would be counted once per '
            'rank, because each rank computes it; use "mean", and scale the loss yourself'
        )
    return None


def check_model(strategy: Strategy, module: nn.Module, config: ShardingConfiguration) -> None:
    """Raises ConfigurationError unless the strategy supports the settings and the module's
    parameters."""
    name = strategy.name
    if config.compressor is not None and strategy.compressor is None:
        compress = _those(lambda other: other.compressor is not None)
        raise ConfigurationError(
            f"strategy={name!r} does not support gradient_compression={config.compressor.name!r}; "
            f"use {compress}, or leave gradient_compression out"
        )
    for field, instead in _INSTEAD.items():
        value = getattr(config, field)
        if value is not None and field not in strategy.settings:
            raise ConfigurationError(
                f"{field}={value!r} with strategy={name!r}, which does not support this setting; "
                f"{instead.format(known=_those_that_know(field))}"
            )
    synchronized = next(
        (path for path, each in module.named_modules() if isinstance(each, nn.SyncBatchNorm)), None
    )
    if synchronized is not None and not strategy.communicates_in_passes:
        raise ConfigurationError(
            f"{synchronized or 'the model'} is a SyncBatchNorm, but with strategy={name!r}, ranks "
            "cannot communicate during a forward pass; use "
            f"{_those(lambda other: other.communicates_in_passes)}, or use BatchNorm, whose "
            "running statistics are averaged over the ranks"
        )
    if (tables := tables_of(module)) and not strategy.sparse_tables:
        raise ConfigurationError(
            f"the model has the sparse table {tables[0].name!r}, whose rows are on parameter "
            f"servers, but strategy={name!r} does not support sparse tables; use "
            f"{_those(lambda other: other.sparse_tables)}, or torch.nn.Embedding"
        )
    _check_embeddings(module)
    for parameter_name, parameter in (
        module.named_parameters() if not strategy.complex_parameters else ()
    ):
        if parameter.requires_grad and parameter.is_complex():
            raise ConfigurationError(
                f"parameter {parameter_name!r} is complex, but strategy={name!r} trains only real "
                "parameters; store it as a real tensor and call torch.view_as_complex in the "
                f"forward pass, or use {_those(lambda other: other.complex_parameters)}"
            )


def _check_embeddings(module: nn.Module) -> None:
    """Checks the module's embeddings. Raises ConfigurationError if a forward pass would change
    weights (as with `max_norm`), because each rank would change them for its own samples. Logs a
    warning if gradients would depend on how a batch is split across ranks (as with
    `scale_grad_by_freq`)."""
    for path, each in module.named_modules():
        if not isinstance(each, nn.Embedding | nn.EmbeddingBag):
            continue
        kind = type(each).__name__
        if each.max_norm is not None:
            raise ConfigurationError(
                f"{path or 'the model'} is an {kind} with max_norm={each.max_norm}, whose forward "
                "pass changes its weight in place: each rank would change the rows for its own "
                "samples, and the ranks' weights would drift apart. Leave max_norm out, and "
                "scale the looked-up rows in the forward pass: rows * (max_norm / "
                "rows.norm(dim=-1, keepdim=True)).clamp(max=1)"
            )
        if each.scale_grad_by_freq:
            _log.warning(
                "%s is an %s with scale_grad_by_freq=True: each rank counts frequencies in its "
                "own part of the batch, so the result depends on the number of ranks. Use "
                "micro-batches (micro_batch_size= of the loader; in a Trainer, accumulate "
                "gradients), which are the same for any number of ranks",
                path or "the model",
                kind,
            )


def _those_that_know(setting: str) -> str:
    return _those(lambda strategy: setting in strategy.settings)


def _those(fit: Callable[[Strategy], bool]) -> str:
    """Returns the names of the strategies that satisfy `fit`, as text for an error message: "zero1,
    zero2 or fsdp"."""
    fitting = [strategy.name for strategy in declarations() if fit(strategy)]
    return " or ".join(filter(None, (", ".join(fitting[:-1]), fitting[-1])))
