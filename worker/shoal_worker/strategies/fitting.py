"""A complete training loop in one call, `optimizer.optimize(OptimizationInputData(...))`, with
validation and early stopping, for every strategy.

The fit runs the loop that a user would write with `ElasticDataLoader`, `train_step` and `evaluate`.
It therefore survives faults like any such loop, and supports pipelines. Its progress is registered
state, so joiners receive it and checkpoints contain it. It neither saves checkpoints nor keeps a
copy of the best model; use `on_epoch` for both.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from shoal_worker.data.loader import ElasticDataLoader, EvaluationBatches
from shoal_worker.data.streaming.stream import is_stream
from shoal_worker.elastic.contract.loader_interface import StepStatus
from shoal_worker.elastic.session.evaluation import Patience, evaluate
from shoal_worker.engine.step.passes import Loss

if TYPE_CHECKING:
    from shoal_worker.elastic.contract.channel import Channel
    from shoal_worker.elastic.session.session import Session
    from shoal_worker.strategies.model import ShardedModel


class Optimizer(Protocol):
    """The methods of `ShardedOptimizer` that a fit calls."""

    def step(self) -> StepStatus: ...
    def zero_grad(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """Results of one epoch, identical on all ranks. With `async_sgd`, they cover only this rank's
    samples."""

    epoch: int
    """Epoch number, from 0."""
    training_loss: float
    """Mean of the training loss over the epoch's samples, as computed during the steps; NaN if
    there are no samples.

    Excludes samples of ranks that left during the epoch, and samples trained before a resume. If
    the run returned to a checkpoint, steps that were undone and repeated are included twice.
    """
    metric: float
    """Mean of the metric over the validation samples, measured after the epoch. Without validation
    samples, the same as `training_loss`."""
    improved: bool
    """True if `metric` is the best so far, by more than `min_delta`."""


@dataclass(frozen=True, kw_only=True)
class OptimizationInputData:
    """Data, length and settings of a fit.

    Raises:
        ConfigurationError: invalid or contradictory values.
    """

    training: Any
    """A map-style dataset of (inputs, targets) pairs, or a pair of tensors."""
    validation: Any = None
    """Validation data, of any type that `training` can have; None: the training loss is used as the
    metric."""
    loss_fn: Loss | None = None
    """Loss of an output and its targets; None: the output's `.loss` is used."""
    metric_fn: Loss | None = None
    """Metric on the validation samples; None: `loss_fn`."""
    epochs: int | None = None
    """Maximum number of epochs; >= 1. None: no limit, in which case `max_steps` is required."""
    max_steps: int | None = None
    """Maximum number of optimizer steps; >= 1. None: no limit, in which case `epochs` is required.
    If the limit ends an epoch early, that epoch is still evaluated and recorded. With `async_sgd`,
    the limit applies to the total number of steps of all ranks."""
    global_batch_size: int
    """Number of samples per step, summed over all ranks; with `async_sgd`, number of samples per
    push of one worker. The last step of an epoch may have fewer samples."""
    micro_batch_size: int | None = None
    """Number of samples in a micro-batch; see `ElasticDataLoader`. None: each rank has one batch
    per step."""
    seed: int = 0
    """Seed for the order of the samples."""
    max_norm: float | None = None
    """Maximum gradient norm for clipping; None: no clipping."""
    scheduler: Any = None
    """Learning-rate scheduler of the optimizer, which the fit registers; the script must not
    register it too. The fit steps it after each committed step. None: the learning rate is
    constant."""
    patience: int | None = None
    """Number of epochs without improvement of the metric after which the fit stops; None: it never
    stops early."""
    min_delta: float = 0.0
    """Minimum change, >= 0: the metric has improved only if it is better by more than this."""
    mode: str = "min"
    """"min" if a lower metric is better, "max" if a higher one is."""
    on_epoch: Callable[[EpochRecord], object] | None = None
    """Function called after each epoch on every rank. It may call functions that all ranks must
    call, such as those that save, report or evaluate, if it does so on every rank."""

    def __post_init__(self) -> None:
        if self.epochs is None and self.max_steps is None:
            raise ConfigurationError(
                "neither epochs= nor max_steps= was given; pass at least one of them"
            )
        for name, value in (("epochs", self.epochs), ("max_steps", self.max_steps)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{name}={value}: expected at least 1")
        if self.patience is not None and self.patience < 1:
            raise ConfigurationError(
                f"patience={self.patience}: expected at least 1 epoch, or None to disable early "
                "stopping"
            )
        if not self.min_delta >= 0:
            raise ConfigurationError(f"min_delta={self.min_delta}: expected at least 0")
        if self.mode not in ("min", "max"):
            raise ConfigurationError(f'mode={self.mode!r}: expected "min" or "max"')
        if self.max_norm is not None and not self.max_norm > 0:
            raise ConfigurationError(
                f"max_norm={self.max_norm}: expected more than 0, or None for no clipping"
            )
        if isinstance(self.scheduler, ReduceLROnPlateau):
            raise ConfigurationError(
                "scheduler=ReduceLROnPlateau is not supported, because it needs a metric after "
                "each epoch; register the scheduler with shoal.register_state and step it in "
                "on_epoch="
            )
        if self.metric_fn is not None and self.validation is None:
            raise ConfigurationError(
                "metric_fn= is computed on the validation samples; pass validation=, or leave "
                "metric_fn out"
            )
        if self.validation is not None and self.loss_fn is None and self.metric_fn is None:
            raise ConfigurationError(
                "validation= without loss_fn= and metric_fn=: pass at least one of them to "
                "compute on the validation samples"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizationResult:
    """Results of `optimize`, identical on all ranks. With `async_sgd`, they cover only this rank's
    steps."""

    best_metric: float
    """Best metric; NaN if no epoch has produced one."""
    best_epoch: int | None
    history: tuple[EpochRecord, ...]
    """Records of all epochs, including those before a resume or before this rank joined."""
    stopped_early: bool
    """True if the fit stopped for lack of improvement. False if it stopped after the last epoch or
    step, or because the job was stopped."""
    steps: int
    """Number of committed optimizer steps of the fit; with `async_sgd`, only this rank's steps."""
    samples: int
    """Number of samples in committed steps, over all ranks and epochs."""


@dataclass
class _Progress:
    """Progress of a fit, as registered state."""

    mode: str
    min_delta: float
    patience: int | None
    history: list[EpochRecord] = field(default_factory=list)
    counter: Patience = field(default_factory=Patience)

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": [asdict(record) for record in self.history],
            "counter": self.counter.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history = [EpochRecord(**record) for record in state["history"]]
        self.counter.load_state_dict(state["counter"])

    def add(self, epoch: int, training_loss: float, metric: float) -> EpochRecord:
        self.counter.observe(metric, mode=self.mode, patience=1, min_delta=self.min_delta)
        record = EpochRecord(
            epoch=epoch,
            training_loss=training_loss,
            metric=metric,
            improved=self.counter.bad_calls == 0,
        )
        self.history.append(record)
        return record

    @property
    def stop(self) -> bool:
        return self.patience is not None and self.counter.bad_calls >= self.patience

    @property
    def best(self) -> EpochRecord | None:
        return next((record for record in reversed(self.history) if record.improved), None)


def fit(
    session: Session, model: ShardedModel, optimizer: Optimizer, data: OptimizationInputData
) -> OptimizationResult:
    """Runs a complete fit and returns its results (`ShardedOptimizer.optimize`)."""
    if not isinstance(data, OptimizationInputData):
        raise ConfigurationError(
            f"optimize({type(data).__name__}): expected a shoal.OptimizationInputData"
        )
    if model.sharding_config.loss_reduction != "mean":
        raise ConfigurationError(
            f"optimize() with loss_reduction={model.sharding_config.loss_reduction!r}: optimize() "
            "reports mean losses and uses them for early stopping; leave loss_reduction out, and "
            "pass a loss_fn that returns a mean"
        )
    name = next(
        name
        for number in itertools.count(1)
        if session.registered.find(name := f"optimize-{number}") is None
    )
    progress = _Progress(mode=data.mode, min_delta=data.min_delta, patience=data.patience)
    leased = model.engine.asynchronous
    loader = ElasticDataLoader(
        _dataset(data.training, "training"),
        global_batch_size=None if leased else data.global_batch_size,
        batch_size=data.global_batch_size if leased else None,
        micro_batch_size=data.micro_batch_size,
        seed=data.seed,
        name=name,
    )
    session.registered.register(name, progress)
    if data.scheduler is not None:
        session.registered.register(f"{name}.scheduler", data.scheduler)
    validation = _validation_loader(data)
    rounds = loader.epochs(data.epochs, max_steps=data.max_steps)
    for epoch in () if progress.stop else rounds:
        sums = _epoch(session, model, optimizer, data, loader)
        training_loss = _mean(session, sums)
        metric = (
            training_loss if validation is None else _validate(session, model, data, validation)
        )
        has_all_steps = data.max_steps is not None and loader.global_step >= data.max_steps
        if (loader.epoch <= epoch and not has_all_steps) or session.is_redoing:
            continue  # the job was stopped during the epoch, or parts of it are being repeated
        record = progress.add(epoch, training_loss, metric)
        if data.on_epoch is not None:
            data.on_epoch(record)
        if progress.stop:
            break
    best = progress.best
    return OptimizationResult(
        best_metric=best.metric if best is not None else math.nan,
        best_epoch=best.epoch if best is not None else None,
        history=tuple(progress.history),
        stopped_early=progress.stop,
        steps=loader.global_step,
        samples=loader.epoch * len(loader.dataset) + loader.state_dict()["samples"],
    )


def _epoch(
    session: Session,
    model: ShardedModel,
    optimizer: Optimizer,
    data: OptimizationInputData,
    loader: ElasticDataLoader,
) -> tuple[float, float]:
    """Trains until the end of the loader's current epoch. Returns the sum of the losses of this
    rank's samples, and the number of these samples."""
    total, samples = 0.0, 0.0
    for step in _steps(loader, in_micro_batches=data.micro_batch_size is not None):
        loss_sum, count = 0.0, 0.0
        for inputs, targets in step:
            # Number of samples of the batch. If a step has too few samples for all ranks, a rank
            # without samples gets a placeholder batch of weight 0.
            weight = (session.step.micro_batch if session.step is not None else None) or 0.0
            loss = float(model.train_step(inputs, targets, data.loss_fn))
            loss_sum, count = loss_sum + loss * weight, count + weight
        if data.max_norm is not None:
            model.clip_grad_norm_(data.max_norm)
        if optimizer.step():
            total, samples = total + loss_sum, samples + count
        if data.scheduler is not None:
            data.scheduler.step()
        optimizer.zero_grad()
    return total, samples


def _steps(loader: ElasticDataLoader, *, in_micro_batches: bool) -> Iterator[Any]:
    """Yields an iterable of batches for each step."""
    if in_micro_batches:
        yield from loader.steps()
    else:
        for batch in loader:
            yield [batch]


def _mean(session: Session, sums: tuple[float, float]) -> float:
    """Returns the mean loss over the samples of all ranks. Must be called on every rank."""

    def body(channel: Channel) -> list[float]:
        everyones = [json.loads(each) for each in channel.exchange(json.dumps(sums).encode())]
        return [sum(column) for column in zip(*everyones, strict=True)]

    total, samples = session.operation("training loss", body)
    return total / samples if samples else math.nan


def _validate(
    session: Session, model: ShardedModel, data: OptimizationInputData, loader: ElasticDataLoader
) -> float:
    measure = data.metric_fn or data.loss_fn
    assert measure is not None

    def sums(_: nn.Module, counted: tuple[int, Any]) -> dict[str, float]:
        samples, (inputs, targets) = counted
        return {
            "sum": float(measure(model.predict(inputs), targets)) * samples,
            "samples": float(samples),
        }

    batches = loader.evaluation_batches()
    assert isinstance(batches, EvaluationBatches)  # `_dataset` ensures this
    found = evaluate(session, model, _Counted(batches), sums)
    return found["sum"] / found["samples"]


class _Counted:
    """Validation batches, each returned with its number of samples, because that number cannot be
    determined from inputs and targets of arbitrary structure."""

    def __init__(self, batches: EvaluationBatches) -> None:
        self._batches = batches
        self.dealing = batches.dealing

    def __len__(self) -> int:
        return len(self._batches)

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, tuple[int, Any]]]:
        """Yields the batches with these indices, each with its number of samples."""
        return (
            (number, (self._batches.samples(number), batch))
            for number, batch in self._batches.read(numbers)
        )


def _validation_loader(data: OptimizationInputData) -> ElasticDataLoader | None:
    if data.validation is None:
        return None
    size = data.micro_batch_size or data.global_batch_size
    return ElasticDataLoader(
        _dataset(data.validation, "validation"), global_batch_size=size, train=False
    )


def _dataset(given: Any, what: str) -> Any:
    if is_stream(given):
        raise ConfigurationError(
            f"{what}: {type(given).__qualname__} is a stream, but optimize() needs a dataset with "
            "a length; write the loop yourself, over an ElasticDataLoader, or pass a dataset "
            "with __len__ and __getitem__(index)"
        )
    if not isinstance(given, Sequence) or not all(isinstance(part, torch.Tensor) for part in given):
        return given
    if len(given) != 2 or len(given[0]) != len(given[1]):
        raise ConfigurationError(
            f"{what}: tensors of {[len(part) for part in given]} samples; expected two tensors, "
            "inputs and targets, with equal numbers of samples"
        )
    return TensorDataset(*given)
