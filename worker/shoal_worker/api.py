"""The public API: functions that use the session of this process. `import shoal` makes them
available as `shoal.init()` and so on."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from torch import nn
from torch.distributed import ProcessGroup

from shoal_worker.checkpoint.files import read_model
from shoal_worker.checkpoint.place import Place, downloaded
from shoal_worker.checkpoint.saving import CheckpointSaver, load_newest
from shoal_worker.compression.compressing_optimizer import GradientCompressionOptimizer, take_apart
from shoal_worker.config import ShardingConfiguration
from shoal_worker.data.loader import ElasticDataLoader
from shoal_worker.data.streaming.stream import ShardedStream
from shoal_worker.elastic.contract.loader_interface import StepStatus
from shoal_worker.elastic.coordinator.fixed import check_own
from shoal_worker.elastic.session import collectives, first_of_machine, torch_calls
from shoal_worker.elastic.session.evaluation import IteratedBatches, is_due
from shoal_worker.elastic.session.evaluation import evaluate as _evaluate
from shoal_worker.elastic.session.worker_process import current_session, find_session, open_session
from shoal_worker.elastic.state.run_values import RunValues, values_in
from shoal_worker.engine.state.parameters import (
    check_memory,
    check_shaped,
    check_unquantized,
)
from shoal_worker.features import whole_batch as whole_batches
from shoal_worker.features.model_session import ModelSession
from shoal_worker.features.several_models import SeveralEngines
from shoal_worker.object_storage import is_url
from shoal_worker.settings import WorkerSettings
from shoal_worker.strategies import registry
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.optimizer import ShardedOptimizer
from shoal_worker.tracking.mlflow import MLflow
from shoal_worker.tracking.opentelemetry import OpenTelemetry
from shoal_worker.tracking.sinks import Sink
from shoal_worker.tracking.tensorboard import TensorBoard
from shoal_worker.tracking.tracker import track as _track
from shoal_worker.tracking.wandb import WandB

if TYPE_CHECKING:
    from shoal_worker.strategies.async_sgd import AsyncSGDModel, AsyncSGDOptimizer
    from shoal_worker.strategies.ddp import DDPModel, DDPOptimizer
    from shoal_worker.strategies.local_sgd import LocalSGDModel, LocalSGDOptimizer

__all__ = [
    "ElasticDataLoader",
    "ShardedModel",
    "ShardedOptimizer",
    "ShardedStream",
    "ShardingConfiguration",
    "StepStatus",
    "MLflow",
    "OpenTelemetry",
    "TensorBoard",
    "WandB",
    "all_reduce",
    "as_distributed",
    "as_distributed_for_high_bandwidth",
    "as_distributed_for_low_bandwidth",
    "barrier",
    "broadcast",
    "device",
    "evaluate",
    "gather",
    "generation",
    "init",
    "is_joining",
    "is_main_process",
    "load_full_state",
    "main_first",
    "print_once",
    "rank",
    "register_state",
    "report",
    "resume",
    "save_checkpoint",
    "shutdown",
    "track",
    "whole_batch",
    "world_size",
]

_CONFIG_FIELDS = frozenset(f.name for f in dataclasses.fields(ShardingConfiguration))


def init() -> None:
    """Joins the cluster that `shoal run` has started; further calls do nothing. In a new job,
    blocks until this member has a rank.

    A rank of `shoal.launch`, or a process started by `mpiexec`, joins the other ranks without a
    coordinator (docs/explanation/backends.md#mpi). Any other process that `shoal run` has not
    started becomes a world of one.

    Raises:
        ConfigurationError: environment variables contradict each other.
        DeadlineError: the coordinator cannot be reached, or fewer workers than the job's minimum
            arrive, within SHOAL_RENDEZVOUS_TIMEOUT_S.
    """
    if find_session() is None:
        open_session()


@overload
def as_distributed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    strategy: Literal["ddp"] = "ddp",
    backend: str | None = None,
    config: ShardingConfiguration | None = None,
    **options: Any,
) -> tuple[DDPModel, DDPOptimizer]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: None = None,
    *,
    strategy: Literal["ddp"] = "ddp",
    backend: str | None = None,
    config: ShardingConfiguration | None = None,
    **options: Any,
) -> DDPModel: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    strategy: Literal["local_sgd"],
    backend: str | None = None,
    config: ShardingConfiguration | None = None,
    **options: Any,
) -> tuple[LocalSGDModel, LocalSGDOptimizer]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: None = None,
    *,
    strategy: Literal["local_sgd"],
    backend: str | None = None,
    config: ShardingConfiguration | None = None,
    **options: Any,
) -> LocalSGDModel: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    strategy: Literal["async_sgd"],
    backend: str | None = None,
    config: ShardingConfiguration | None = None,
    **options: Any,
) -> tuple[AsyncSGDModel, AsyncSGDOptimizer]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: None = None,
    *,
    strategy: Literal["async_sgd"],
    backend: str | None = None,
    config: ShardingConfiguration | None = None,
    **options: Any,
) -> AsyncSGDModel: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    strategy: str,
    backend: str | None = None,
    config: ShardingConfiguration | None = None,
    **options: Any,
) -> tuple[ShardedModel, ShardedOptimizer]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: None = None,
    *,
    strategy: str,
    backend: str | None = None,
    config: ShardingConfiguration | None = None,
    **options: Any,
) -> ShardedModel: ...
@overload
def as_distributed(
    model: Sequence[nn.Module],
    optimizer: Sequence[torch.optim.Optimizer],
    *,
    strategy: str = "ddp",
    backend: str | None = None,
    config: ShardingConfiguration | None = None,
    **options: Any,
) -> tuple[tuple[ShardedModel, ...], tuple[ShardedOptimizer, ...]]: ...
def as_distributed(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    strategy: str = "ddp",
    backend: str | None = None,
    config: ShardingConfiguration | None = None,
    **options: Any,
) -> Any:
    """Distributes a model and its optimizer across the ranks of the job. Returns the distributed
    model and optimizer, or only the model if `optimizer` is None.

    All ranks start with rank 0's weights; other ranks may pass a model on the `meta` device. The
    model is moved to `shoal.device()`.

    Several models in one loop (a generator and a discriminator) are passed together, as a tuple of
    models and a tuple with one optimizer per model; the results are tuples too. Each optimizer may
    step at most once per batch, in any order. All their updates are committed or undone together,
    as one step of the run. `step()` returns PENDING until the last of them has stepped.

    Args:
        model: the user's unsharded module, or a tuple of modules.
        optimizer: optimizer of `model.parameters()`, or a tuple with one for each model. With
            `GradientCompressionOptimizer(optimizer, compressor)`, gradients are sent compressed.
        strategy: how the ranks share the work; see the strategies' pages.
        backend: "gloo" or "nccl"; None: nccl if CUDA is available, otherwise gloo. In
            `shoal.launch`, "inmemory" or None; under `mpiexec`, "mpi" or None.
        config: settings common to all strategies.
        **options: fields of `ShardingConfiguration`, or options of the strategy.

    Raises:
        ConfigurationError: an unknown strategy, backend or option, or values that cannot be
            combined.
        PreconditionError: this process has already called this function.
    """
    several = isinstance(model, tuple | list)
    models, optimizers = _in_pairs(model, optimizer)
    for one, its_optimizer in zip(models, optimizers, strict=True):
        _check_kinds(one, its_optimizer, config)
    session = current_session()
    session.refuse_second_call()
    for one in models:
        check_shaped(one)
        check_unquantized(one)
        check_own(one)
    model_class, optimizer_class = registry.find(strategy)
    common = {name: value for name, value in options.items() if name in _CONFIG_FIELDS}
    config = dataclasses.replace(config or ShardingConfiguration(), **common)
    if len(models) > 1:
        registry.check_several(model_class.declaration, models, config)
    check_memory(models, strategy, kept=model_class.declaration.keeps_memory)
    specific = {name: value for name, value in options.items() if name not in _CONFIG_FIELDS}
    of_each = registry.options_of_each(specific, len(models)) if len(models) > 1 else [specific]
    taken_apart = [take_apart(each, config.compressor) for each in optimizers]
    for one in models:
        if not any(p.is_meta for p in one.parameters()):
            one.to(session.device)
    parameters = (parameter for one in models for parameter in one.parameters())
    session.registered.made_from(
        parameters, *(its_optimizer for its_optimizer, _ in taken_apart), device=session.device
    )
    peers: list[ModelSession] = []
    among = [
        ModelSession(session, peers, SeveralEngines) if len(models) > 1 else None for _ in models
    ]
    distributed = [
        registry.build(
            model_class,
            optimizer_class,
            one,
            its_optimizer,
            session,
            dataclasses.replace(config, gradient_compression=compressor),
            backend=backend,
            options=its_options,
            among=own,
        )
        for one, (its_optimizer, compressor), own, its_options in zip(
            models, taken_apart, among, of_each, strict=True
        )
    ]
    whole_batches.prepare(session, registry.why_no_whole_batch(model_class.declaration, config))
    if several:
        return tuple(one for one, _ in distributed), tuple(wrapped for _, wrapped in distributed)
    alone, wrapped = distributed[0]
    return alone if wrapped is None else (alone, wrapped)


def _in_pairs(model: Any, optimizer: Any) -> tuple[list[Any], list[Any]]:
    """Returns the models and their optimizers as two lists of the same length. Raises
    ConfigurationError if there are several models and not exactly one optimizer for each."""
    if not isinstance(model, tuple | list):
        return [model], [optimizer]
    optimizers = list(optimizer) if isinstance(optimizer, tuple | list) else []
    if not model or len(optimizers) != len(model) or any(each is None for each in optimizers):
        raise ConfigurationError(
            f"as_distributed: got {len(model)} models and {len(optimizers)} optimizers; expected "
            "one optimizer per model, in the same order: as_distributed((model_a, model_b), "
            "(optimizer_a, optimizer_b)). Leave out a model that is not trained"
        )
    return list(model), optimizers


def _check_kinds(model: object, optimizer: object, config: object) -> None:
    """Checks the types of the arguments. Raises ConfigurationError unless they are a module, an
    optimizer and a configuration."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"as_distributed: model has type {type(model).__name__}; expected an nn.Module as the "
            "first argument: as_distributed(model, optimizer)"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigurationError(
            "as_distributed: the model is wrapped in DistributedDataParallel, which would also "
            "synchronize gradients; pass its .module"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"as_distributed: optimizer={optimizer!r}; expected an optimizer made from "
            "model.parameters(), or None"
        )
    if optimizer is not None and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ConfigurationError(
            f"as_distributed: the constructor of {type(optimizer).__name__} does not call "
            "torch.optim.Optimizer.__init__, so it lacks attributes that every torch optimizer "
            "has; call super().__init__(params, defaults) there, and implement the update in "
            "step()"
        )
    if config is not None and not isinstance(config, ShardingConfiguration):
        raise ConfigurationError(
            f"as_distributed: config={config!r}; expected a ShardingConfiguration, or its fields "
            "as keyword arguments"
        )


@overload
def as_distributed_for_high_bandwidth(
    model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any
) -> tuple[ShardedModel, ShardedOptimizer]: ...
@overload
def as_distributed_for_high_bandwidth(
    model: nn.Module, optimizer: None = None, **options: Any
) -> ShardedModel: ...
def as_distributed_for_high_bandwidth(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> Any:
    """Calls `as_distributed` with `ShardingConfiguration.for_high_bandwidth()`: buckets of 100 MiB
    and no compression.

    `options`: arguments of `as_distributed`, which override these settings. For measurements, see
    docs/explanation/compression.md#presets.
    """
    return as_distributed(
        model, optimizer, config=ShardingConfiguration.for_high_bandwidth(), **options
    )


@overload
def as_distributed_for_low_bandwidth(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, strategy: str = "ddp", **options: Any
) -> tuple[ShardedModel, ShardedOptimizer]: ...
@overload
def as_distributed_for_low_bandwidth(
    model: nn.Module, optimizer: None = None, *, strategy: str = "ddp", **options: Any
) -> ShardedModel: ...
def as_distributed_for_low_bandwidth(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strategy: str = "ddp",
    **options: Any,
) -> Any:
    """Calls `as_distributed` with `ShardingConfiguration.for_low_bandwidth()` and a compressor
    suitable for the strategy.

    `gradient_compression` is "powersgd" (rank 4) with ddp, and "topk" (1 %) with strategies that
    shard or push gradients (zero1, zero2, zero3, fsdp, async_sgd). The other strategies do not
    compress. If `optimizer` already has a compressor (`GradientCompressionOptimizer`), that
    compressor is used. `options`: arguments of `as_distributed`, which override these settings. For
    measurements, see docs/explanation/compression.md#presets.
    """
    chosen = (
        None
        if isinstance(optimizer, GradientCompressionOptimizer)
        else registry.compressor_for(strategy)
    )
    config = ShardingConfiguration.for_low_bandwidth(gradient_compression=chosen)
    return as_distributed(model, optimizer, strategy=strategy, config=config, **options)


def register_state(**objects: Any) -> RunValues:
    """Registers objects and plain values as part of the run's state. They are sent to joiners,
    restored when a step is repeated, and saved in checkpoints.

    Objects must have state_dict and load_state_dict. Plain values (numbers, strings, None, tensors,
    and lists, tuples, sets and dictionaries of them) become attributes of the result. All ranks
    must read and write them in the same way:

        run = shoal.register_state(best=0.0)
        ...
        run.best = max(run.best, accuracy)

    A list, dictionary, set, array or tensor is loaded in place until the script assigns a new
    value, so the script may also change it under the name that it had before.

    After an aborted step, each object is restored to the state that it had when the script received
    that step's batch. All changes that the script makes before it receives the batch again are
    undone. In a loop without a Shoal loader, each object is restored to the state that it had at
    the beginning of the step, and changes after `optimizer.step()` are kept. For this purpose,
    Shoal calls `state_dict()` in every step of a job. Objects with more than 64 MiB of tensors, or
    256 KiB of other values, are not restored, and a warning is logged. Nor are loaders: iterable
    datasets, and objects other than modules that can be iterated over but not indexed. The `step`
    of registered schedulers and the `update` of registered gradient scalers do nothing after an
    aborted step.

    Returns:
        The plain values; empty if none were given.

    Raises:
        ConfigurationError: an object lacks one of the two methods, or a name is already used.
    """
    session = current_session()
    values = values_in(objects)
    for name, value in {**objects, **values}.items():
        session.registered.register(name, value, copied=True)
    return RunValues(values)


@overload
def evaluate(
    model: nn.Module,
    loader: Any,
    fn: Callable[[nn.Module, Any], Mapping[str, Any]],
    *,
    every_steps: None = None,
) -> dict[str, float]: ...
@overload
def evaluate(
    model: nn.Module,
    loader: Any,
    fn: Callable[[nn.Module, Any], Mapping[str, Any]],
    *,
    every_steps: int,
) -> dict[str, float] | None: ...
def evaluate(
    model: nn.Module,
    loader: Any,
    fn: Callable[[nn.Module, Any], Mapping[str, Any]],
    *,
    every_steps: int | None = None,
) -> dict[str, float] | None:
    """Evaluates a model, with the batches distributed across all ranks. Calls `fn(model, batch)`
    for each batch of `loader`, and returns the sums of the results over all batches.

    `fn` returns sums (correct answers, samples, summed loss), not means. The model is in evaluation
    mode, without gradients. Must be called on every rank, between steps; every rank receives the
    result. If a rank fails during the evaluation, its batches are reassigned, so each batch is
    counted exactly once. Before each batch, the global random generators are seeded according to
    the batch's number, so noise or dropout in `fn` does not depend on the number of ranks.

    Args:
        model: from `as_distributed`, or any module that is the same on all ranks.
        loader: an `ElasticDataLoader(train=False)`, or any loader with a length that yields the
            same batches on every rank.
        fn: called with the model and one batch.
        every_steps: evaluate only after a committed step whose number in the run is a multiple of
            this, otherwise return None. Use it if this function is called in every iteration, after
            `optimizer.step()`. All ranks, including joiners, make the same decision, and none
            evaluates twice after the same step.

    Raises:
        ConfigurationError: the batches of `loader` cannot be distributed (it has no length, for
            example); `loader` draws different samples on each rank; or `fn` does not return sums.
        PreconditionError: the ranks' loaders differ (RANKS_DIVERGED), or `every_steps` was passed
            inside a step (STEP_NOT_FINISHED).
    """
    if every_steps is not None and not is_due(current_session(), every_steps, "evaluate"):
        return None
    batches = (
        loader.evaluation_batches()
        if isinstance(loader, ElasticDataLoader)
        else IteratedBatches(loader)
    )
    return _evaluate(current_session(), model, batches, fn)


def save_checkpoint(
    directory: str | Path,
    *,
    keep: int = 3,
    best: float | torch.Tensor | None = None,
    mode: Literal["min", "max"] | None = None,
    sharded: bool | None = None,
    every_steps: int | None = None,
    frozen: Literal["write", "reference"] = "write",
) -> None:
    """Saves model, optimizer, registered state and cursors, asynchronously and atomically. Must be
    called on every rank, between steps.

    The state is copied before this function returns. `directory/step-<n>` is written in the
    background, and renamed into place once it is complete. If an earlier save has failed, this call
    raises its error. In a joiner, the call does nothing. If a rank fails before its shard is
    written, this checkpoint is abandoned, and the previous one remains the newest. Rows of sparse
    tables are read from the servers; under ddp, all ranks do so before this function returns.

    Args:
        directory: a directory that all ranks share, or that is local to the first rank's machine;
            or the URL of an object store, such as "s3://bucket/run". With a URL, the checkpoint is
            written to a local directory (SHOAL_STAGING_DIR) and uploaded in the background.
        keep: number of the newest checkpoints to keep; >= 1.
        best: metric of the state, the same on every rank, such as the accuracy from
            `shoal.evaluate`. The run's checkpoint with the best metric is kept in addition to the
            newest ones; if several have the same metric, the earliest is kept. NaN or None: not
            measured. Infinite values are refused.
        mode: "min": smaller values of `best` are better; "max": larger. Required with `best`.
        sharded: True: if the state is sharded (zero1, zero2, zero3, fsdp, hsdp), each rank writes
            its own part, and nothing is gathered; an error is raised unless all ranks see the
            directory. None: the same, but if some ranks do not see the directory, the first rank
            gathers and writes everything. False: the first rank always does so.
        every_steps: save only after a committed step whose number in the run is a multiple of this;
            use it if this function is called in every iteration, after `optimizer.step()`. All
            ranks, including joiners, make the same decision, and no step is saved twice.
        frozen: how to save parameters that did not require gradients when `as_distributed` was
            called, such as the base model of an adapter. "write": their values are stored in files
            that the checkpoints in the directory share (hard links, or copies where links are
            impossible), so every checkpoint is complete. "reference": only their digests are saved;
            `resume` then needs a model with the same values from the script, and `load_full_state`
            needs `base`.

    Raises:
        PreconditionError (STEP_NOT_FINISHED): `every_steps` was passed inside a step.
        ConfigurationError: `keep` is below 1; `best` is not one finite number, has no `mode`, or
            differs between ranks; or `directory` cannot be written to, is not shared, or contains a
            later step of another run. With `every_steps`, the last is found in the first call,
            unless `directory` is a URL.
        UnavailableError (CHECKPOINT_NOT_WRITTEN): an earlier save has failed or, under ddp, saving
            the rows of sparse tables has failed now.
        PermissionDeniedError (OBJECT_STORAGE_REFUSED): the object store has refused the
            credentials, in this call or in an earlier upload.
        UnavailableError (OBJECT_STORAGE_UNAVAILABLE): during the first save to this URL, the object
            store kept failing for too long.
        DeadlineError (SERVER_AWAY): a server with rows of sparse tables was unreachable for too
            long.
    """
    if keep < 1:
        raise ConfigurationError(f"save_checkpoint(keep={keep}): expected a positive integer")
    if frozen not in ("write", "reference"):
        raise ConfigurationError(
            f'save_checkpoint(frozen={frozen!r}): expected "write" or "reference"'
        )
    metric = _metric(best, mode)
    session = current_session()
    saver = CheckpointSaver.of(session)
    if every_steps is not None and not is_due(session, every_steps, "save_checkpoint"):
        saver.announce(session, directory, step=(session.steps // every_steps + 1) * every_steps)
        return
    saver.save(
        session,
        Place.of(directory, session.settings),
        keep=keep,
        sharded=sharded,
        frozen=frozen,
        best=metric,
        mode=mode if metric is not None and mode is not None else "",
    )


def _metric(best: float | torch.Tensor | None, mode: str | None) -> float | None:
    """Returns the metric `best` as a float, or None. Raises ConfigurationError if the metric or
    `mode` is invalid."""
    if mode not in ("min", "max") and (best is not None or mode is not None):
        raise ConfigurationError(
            f'save_checkpoint(mode={mode!r}): expected mode="max" if larger values of best= are '
            'better, such as an accuracy, or mode="min" if smaller ones are, such as a loss'
        )
    try:
        metric = None if best is None else float(best)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: several elements
        raise ConfigurationError(
            f"save_checkpoint(best={best!r}): expected one number ({error})"
        ) from error
    if metric is not None and math.isinf(metric):
        raise ConfigurationError(f"save_checkpoint(best={metric}): expected a finite number")
    return metric


def resume(directory: str | Path) -> bool:
    """Continues from the newest checkpoint in `directory`. Returns whether there was one. Must be
    called on every rank, before the loop.

    The first rank reads the checkpoint (complete or in shards, saved under any strategy on any
    number of ranks) and sends it to the others. In a joiner, the call does nothing, because the
    peers' state is newer. The parameter servers receive the rows of sparse tables: under ddp all
    rows; under async_sgd only rows that have not been trained on the servers yet.

    Args:
        directory: the directory or URL passed to `save_checkpoint`.

    Raises:
        PermissionDeniedError (OBJECT_STORAGE_REFUSED): the object store refuses the credentials.
        UnavailableError (OBJECT_STORAGE_UNAVAILABLE): the object store has failed for too long.
        CorruptDataError: the newest checkpoint is damaged, or belongs to a different model or a
            newer release; or it was saved with `frozen="reference"`, and the model's frozen
            parameters have different values (BASE_MODEL_DIFFERS). Nothing is changed.
        ConfigurationError: `directory` is a checkpoint itself, or a file.
    """
    session = current_session()
    return load_newest(session, Place.of(directory, session.settings))


def load_full_state(
    path: str | Path,
    *,
    model: int | None = None,
    best: bool = False,
    average: int | None = None,
    base: nn.Module | Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Returns the state of the model, or of an average of it, from a checkpoint, for
    `module.load_state_dict`: keys are the original module's names. Can be called without a session.

    Args:
        path: a directory or URL passed to `save_checkpoint`, to read its newest checkpoint; or one
            `step-<n>` in it.
        model: index of the model in a run that trained several, in the order of `as_distributed`.
        best: read the checkpoint with the best metric of the newest run in the directory, instead
            of the newest checkpoint; see `best` of `save_checkpoint`.
        average: index of the `AveragedModel` to read instead of the model, in order of creation; 0
            if the script created only one.
        base: for a checkpoint saved with `frozen="reference"`: the model as it was before
            `as_distributed`, or its state dict. It provides the values of the frozen parameters.

    Raises:
        ConfigurationError: there is no checkpoint, or none with a metric if `best` is set. The
            checkpoint has several models and `model` is not the index of one; or it has no such
            average; or both `model` and `average` are given.
        CorruptDataError: the checkpoint is damaged, or was written by a different program or a
            newer release; or it needs values of frozen parameters that `base` lacks
            (BASE_MODEL_DIFFERS).
    """
    values = base.state_dict() if isinstance(base, nn.Module) else base
    with downloaded(path, WorkerSettings(), best=best) as found:
        of_best = best and not is_url(path)  # otherwise the best one was downloaded
        return read_model(found, model, of_best=of_best, average=average, base=values or {})


def report(**numbers: float | torch.Tensor) -> None:
    """Reports this rank's loss, and up to 16 other numbers, to `shoal status`, `shoal top`, the
    status page, trackers (`track`) and the plot of the run (`shoal run --plot`):
    `shoal.report(loss=loss, accuracy=0.98)`. The loss is also exported to Prometheus. `train_step`
    reports its loss itself.

    Can be called in every step: a number on a GPU is copied in the background once the GPU has
    computed it. A name that is not reported again keeps its last value.

    Raises:
        ConfigurationError: a value is not a single number, or there are too many names.
    """
    current_session().progress.report(numbers)


def all_reduce(value: Any, op: str = "sum") -> Any:
    """Combines all ranks' values with `op`: "sum", "mean", "max" or "min". Must be called on every
    rank, between steps.

    Values are numbers, tensors of one shape, and lists, tuples and dictionaries of them, with the
    same structure on all ranks. The result is bitwise the same on all ranks. The call survives
    faults, as `evaluate` does: if a rank fails, the remaining ranks' values are combined. In a
    joiner that is replaying its script (`is_joining`), the result is the joiner's own value.
    Intended for metrics and decisions, because all values are gathered on every rank. The strategy
    handles gradients and other large tensors.

    Raises:
        ConfigurationError: `op` is unknown, or a value cannot be summed.
        PreconditionError: the call was made inside a step (STEP_NOT_FINISHED), or under async_sgd,
            whose workers take independent steps; or the ranks passed values of different shapes.
    """
    return collectives.all_reduce(current_session(), value, op)


def gather(value: Any) -> list[Any]:
    """Returns all ranks' values, in rank order, on every rank. Must be called on every rank,
    between steps.

    Values are tensors (on the CPU; shapes may differ), numbers, strings, None, and lists, tuples
    and dictionaries of them. The call survives faults: the list has one entry for each remaining
    rank. In a joiner that is replaying its script, the list contains only the joiner's value.

    Raises:
        ConfigurationError: a value of an unsupported type.
        PreconditionError: see `all_reduce`.
    """
    return collectives.gather(current_session(), value)


def broadcast(value: Any = None, *, from_rank: int = 0) -> Any:
    """Returns the value of rank `from_rank` on every rank; other ranks' values are ignored. Must be
    called on every rank, between steps.

    Types of values and errors are the same as for `gather`. In a joiner that is replaying its
    script, the result is the joiner's own value. Use `register_state` for values that must be the
    same on a joiner as on its peers.
    """
    return collectives.broadcast(current_session(), value, from_rank)


def barrier() -> None:
    """Waits until each rank has either called this function or failed. Must be called between
    steps; raises the same errors as `all_reduce`.

    For work that one rank does before the others, use `main_first`: waiting in it is not mistaken
    for a hang.
    """
    collectives.barrier(current_session())


def process_group() -> ProcessGroup:
    """Returns a fault-tolerant torch process group, for calls between steps:
    `torch.distributed.all_reduce(x, group=shoal.process_group())`.

    The group supports all collectives of torch.distributed, including object collectives, with SUM,
    AVG, MAX, MIN and PRODUCT. After a fault, the remaining ranks repeat a call, provided that no
    rank has called `get_rank(group)` or `get_world_size(group)`, and that the collective does not
    depend on either. Otherwise, the first collective after a change of ranks raises
    MembershipChanged (RANKS_CHANGED) on all ranks, without writing to its tensors. The script must
    then ask for rank and world size again, and repeat the collective.

    The group becomes torch's default group, so that `torch.distributed.is_initialized()` is true
    from then on. Without a job, and in a joiner that is replaying its script, the group is a world
    of one. The joiner's `get_rank` is -1, so that the joiner is not mistaken for rank 0.

    Raises:
        PreconditionError: the script has called `torch.distributed.init_process_group`
            (DEFAULT_GROUP_EXISTS). The group's collectives also raise it inside a step
            (STEP_NOT_FINISHED), under async_sgd, and for messages between two ranks.
    """
    return torch_calls.process_group(current_session())


@overload
def whole_batch(tensor: torch.Tensor, /) -> torch.Tensor: ...
@overload
def whole_batch(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]: ...
def whole_batch(*tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Returns the rows of all ranks' samples in a step, in the order of the global batch. Used for
    losses that compare samples, such as contrastive losses.

    Each rank computes the loss of the whole batch from these rows. The result of the step then
    equals the result of a single process, up to rounding, regardless of how the batch is split
    across ranks. Gradients are propagated to each rank's own rows. Must be called on every rank, in
    the same order and the same number of times. Later computations must be the same on all ranks
    (no dropout). With a single rank, or outside of steps (in an evaluation, for example), returns
    only the rank's own rows.

    Args:
        tensors: one tensor, or several with the same number of rows, such as features and labels.
            Shapes: (rows, ...). Ranks may have different numbers of rows.

    Returns:
        A tensor of shape (all rows, ...), or a tuple of such tensors if several were passed.

    Raises:
        ConfigurationError: the tensors have no rows, or different numbers of rows; the loader has
            micro_batch_size=; or loss_reduction is "sum". Also raised under tensor, pipeline,
            hybrid, local_sgd and async_sgd, where ranks do not run each pass together on their own
            samples.
        PreconditionError: called before `as_distributed`; or ranks passed tensors of different
            kinds (RANKS_DIVERGED).
    """
    whole = whole_batches.whole_batch(current_session(), tensors)
    return whole[0] if len(whole) == 1 else tuple(whole)


def print_once(*values: Any, **options: Any) -> None:
    """Calls `print` on only one rank: the first rank that has the run's state. Does not wait for
    other ranks."""
    if is_main_process():
        print(*values, **options)  # noqa: T201 - what it is for


def main_first(*, timeout: timedelta = timedelta(hours=1)) -> AbstractContextManager[bool]:
    """Context for work that one process of each machine does before the others, such as a download,
    filling a cache, or compiling an extension.

    The first process to arrive runs the block alone and receives True. The others run it afterwards
    and receive False; the work is done by then. If the first process fails within the block,
    another takes its place. Under `shoal run`, a process that later replaces a failed one also
    receives False: the work is done once per machine and run. May be used anywhere, even before
    `init()`.

    Raises:
        DeadlineError: the first process took longer than `timeout`.
    """
    block = first_of_machine.next_block(inspect.currentframe())
    settings = WorkerSettings.load()
    # `--standalone` does not number runs, but each run has its own launcher
    run = settings.run or settings.launcher_id or ""
    scope = f"{settings.job_id} {run} {Path.cwd()} {block}"
    return first_of_machine.main_first(scope, timeout=timeout, once=bool(run))


def track(*sinks: Sink, every_steps: int = 10) -> None:
    """Writes loss, speed, ranks, faults and joins to `sinks`, every `every_steps` steps:
    `shoal.TensorBoard("runs/digits")`, `shoal.MLflow("digits")`, `shoal.WandB("digits")`,
    `shoal.OpenTelemetry()`.

    A number that the script reports less often (`shoal.report`), for example once per epoch, is
    written whenever it is reported, and the last report of each number at the end of the run.

    Must be called once on every rank, before the loop. The first rank writes, and if it fails, the
    next rank continues in the same run; OpenTelemetry receives data from all ranks. After a resume,
    repeated steps appear only once. The loss is the one reported by the writing rank
    (`shoal.report`), or by `train_step`. Training never waits for a tracker: reports are buffered
    while the tracker is unreachable.

    Raises:
        ConfigurationError: `every_steps` is below 1.
    """
    _track(current_session(), sinks, every_steps=every_steps)


def is_main_process() -> bool:
    """Returns True in the one process that writes files and reports on behalf of all ranks: the
    first rank that has the run's state. Returns False in a joiner that is replaying its script
    (`is_joining`).

    The process stays the same when other ranks join or fail. If the process itself fails, another
    one takes its place, so call this function each time:

        if shoal.is_main_process(): torch.save(state, "best.pt")
    """
    return current_session().is_first


def is_joining() -> bool:
    """Returns True in a joiner that is still replaying its script and has not received its first
    training batch."""
    return current_session().is_joining


def rank() -> int:
    """Returns this process's rank in its newest generation. The rank changes when members join and
    leave.

    Returns -1 in a joiner that is replaying its script (`is_joining`), which has no rank yet and
    must not act as rank 0. After `shutdown()`, returns the rank that the process had.
    """
    return current_session().script_placement.rank


def world_size() -> int:
    """Returns the number of ranks in this process's newest generation; -1 in a joiner that is
    replaying its script. After `shutdown()`, returns the last world size."""
    return current_session().script_placement.world_size


def generation() -> int:
    """Returns the number of this process's newest generation; 0 in a world of one."""
    return current_session().generation


def device() -> torch.device:
    """Returns the device of this rank: its own GPU if CUDA is available, otherwise the CPU."""
    return current_session().device


def shutdown(*, timeout: timedelta = timedelta(seconds=60)) -> None:
    """Waits for checkpoints in progress and leaves the job. Called automatically when the process
    exits.

    Raises:
        DeadlineError: a checkpoint was not written within `timeout`.
    """
    session = find_session()
    if session is None:
        raise PreconditionError("shutdown: there is no session; call shoal.init() first")
    CheckpointSaver.of(session).close(timeout)
    session.close()
