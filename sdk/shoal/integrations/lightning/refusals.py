"""Rejects unsupported uses of a Trainer with Shoal's strategy before training begins, with errors
that name the alternative."""

from __future__ import annotations

import inspect
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from shoal_common.errors import ConfigurationError
from torchmetrics import MetricTracker
from torchmetrics.wrappers.abstract import WrapperMetric

from shoal.integrations.lightning.checkpoints import Checkpoints
from shoal.integrations.lightning.preparing import preparers

STRATEGIES: Final = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")
"""Strategies that train a module with its own forward and backward passes. All others train with
`train_step`, or are not synchronous data parallelism."""

_CHECKPOINTS: Final = (
    "use shoal.integrations.lightning.Checkpoints(directory, every_n_steps=..., keep=...)"
)

_CALLBACKS: Final[dict[type[Any], str]] = {
    callbacks.Checkpoint: _CHECKPOINTS,
    callbacks.OnExceptionCheckpoint: _CHECKPOINTS,
    callbacks.GradientAccumulationScheduler: "the batch size of a step is fixed; set "
    "accumulate_grad_batches",
    callbacks.StochasticWeightAveraging: "average in your own loop (docs/guides/averages.md)",
    callbacks.WeightAveraging: "average in your own loop (docs/guides/averages.md)",
    callbacks.Timer: "workers with different clocks would stop at different steps; set max_steps",
    callbacks.BatchSizeFinder: "set the batch size",
    callbacks.LearningRateFinder: "set the learning rate",
    callbacks.ModelPruning: "the layout of the parameters is fixed when training begins",
    callbacks.BaseFinetuning: "pass all parameters to the optimizer from the start, and freeze "
    "them with requires_grad_(False)",
}
"""Unsupported callbacks, each with its alternative."""

_MODULE: Final = {
    "optimizer_step": "a step may be aborted; set learning rates with a scheduler, and change "
    "gradients in on_before_optimizer_step",
    "optimizer_zero_grad": "the strategy clears gradients",
    "configure_gradient_clipping": "gradients may be sharded over the ranks; set gradient_clip_val",
    "on_save_checkpoint": "Shoal saves its own checkpoints; add objects with "
    "shoal.register_state(name=object)",
    "on_load_checkpoint": "Shoal saves its own checkpoints; add objects with "
    "shoal.register_state(name=object)",
}
"""Methods of a LightningModule that are not called or would be harmful, each with its
alternative."""


def _refuse(what: str, instead: str) -> ConfigurationError:
    return ConfigurationError(f"{what} is not supported by ShoalStrategy: {instead}")


def check_trainer(trainer: pl.Trainer) -> None:
    """Raises ConfigurationError if the Trainer is used in a way that cannot survive faults."""
    _check_arguments(trainer)
    if trainer.state.fn is TrainerFn.FITTING:
        _check_callbacks(trainer)
        _check_module(trainer.lightning_module)
    datamodule = getattr(trainer, "datamodule", None)
    for name in ("state_dict", "load_state_dict"):
        if datamodule is not None and is_overridden(name, datamodule, pl.LightningDataModule):
            raise _refuse(f"{type(datamodule).__name__}.{name}", _MODULE["on_save_checkpoint"])
    for owner in preparers(trainer):
        if not owner.prepare_data_per_node:
            raise _refuse(
                f"{type(owner).__name__}.prepare_data_per_node=False",
                "prepare_data runs on each machine; if machines share a directory, make it check "
                "what already exists there",
            )


def _check_arguments(trainer: pl.Trainer) -> None:
    connector = trainer._accelerator_connector
    precision = trainer.precision_plugin
    given: dict[str, tuple[Any, tuple[Any, ...], str]] = {
        "devices": (
            connector._devices_flag,
            ("auto", 1, "1"),
            "each worker uses one device; set the number of workers with `shoal run "
            "--nproc-per-node`",
        ),
        "num_nodes": (
            connector._num_nodes_flag,
            (1,),
            "a job runs on the hosts where `shoal run` was started",
        ),
        "sync_batchnorm": (
            connector._layer_sync is not None,
            (False,),
            "use nn.SyncBatchNorm in the module, which Shoal's ranks share",
        ),
        "reload_dataloaders_every_n_epochs": (
            trainer.reload_dataloaders_every_n_epochs,
            (0,),
            "all epochs use one dataset; make the dataset itself change with the epoch",
        ),
        "gradient_clip_algorithm": (
            str(getattr(trainer.gradient_clip_algorithm, "value", "norm")),
            ("norm",),
            "use gradient_clip_algorithm='norm', whose norm is computed over all ranks",
        ),
    }
    for name, (value, allowed, instead) in given.items():
        if (
            not any(type(value) is type(one) and value == one for one in allowed)
            and value is not None
        ):
            raise _refuse(f"{name}={value!r}", instead)
    if trainer.state.fn is TrainerFn.FITTING and trainer.limit_train_batches == 0:
        raise _refuse(
            f"fit() with limit_train_batches={trainer.limit_train_batches}",
            "nothing would be trained; call validate() or test() instead",
        )
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise _refuse(
            "val_check_interval as a time",
            "workers with different clocks would validate at different steps; pass a number "
            "of steps",
        )
    scaled = isinstance(precision, MixedPrecision) and precision.scaler is not None
    if scaled or type(precision) not in (Precision, MixedPrecision):
        raise _refuse(f"precision={precision.precision!r}", "use '32-true' or 'bf16-mixed'")


def _is_default(callback: Any) -> bool:
    """Returns whether a callback is the ModelCheckpoint that a Trainer adds by default, or has the
    same settings."""
    if type(callback) is not callbacks.ModelCheckpoint:
        return False
    own, default = (
        {name: value for name, value in vars(one).items() if name not in ("log", "log_dict")}
        for one in (callback, callbacks.ModelCheckpoint())
    )
    return bool(own == default)


def _check_callbacks(trainer: pl.Trainer) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, Checkpoints) or _is_default(callback):
            continue
        instead = next(
            (text for kind, text in _CALLBACKS.items() if isinstance(callback, kind)), None
        )
        if instead is not None:
            raise _refuse(type(callback).__name__, instead)


def use_checkpoints(trainer: pl.Trainer) -> Checkpoints | None:
    """Removes a Trainer's default ModelCheckpoint, because an elastic fit could not resume from its
    files. Returns the fit's `Checkpoints`; None if there is none.

    Raises:
        ConfigurationError: there are several `Checkpoints`.
    """
    kept = [one for one in trainer.callbacks if not _is_default(one)]
    if len(kept) < len(trainer.callbacks):
        rank_zero_info("ShoalStrategy saves no checkpoints by itself: %s", _CHECKPOINTS)
    trainer.callbacks = kept
    found = [one for one in kept if isinstance(one, Checkpoints)]
    if len(found) > 1:
        raise ConfigurationError(f"callbacks contains {len(found)} Checkpoints; pass only one")
    return found[0] if found else None


def _check_module(module: pl.LightningModule) -> None:
    kind = type(module).__name__
    if not module.automatic_optimization:
        raise _refuse(
            f"{kind}.automatic_optimization=False",
            "a step may be aborted, and the script would have to check for that; write your "
            "own loop, with one optimizer or several (docs/migration/trainers.md, "
            "docs/guides/several-models.md)",
        )
    for name, instead in _MODULE.items():
        if is_overridden(name, module):
            raise _refuse(f"{kind}.{name}", instead)
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise _refuse(
            f"{kind}.training_step(dataloader_iter)",
            "use the batch: training_step(self, batch, batch_idx)",
        )


def check_metrics(module: pl.LightningModule) -> None:
    """Raises ConfigurationError if the module has metrics that cannot be combined across ranks.
    Must be called only when Lightning has finished setting up the module."""
    for name, one in module.named_modules():
        if isinstance(one, (WrapperMetric, MetricTracker)):
            raise _refuse(
                f"{type(module).__name__}.{name}, a torchmetrics {type(one).__name__}",
                "it stores values outside of its metric state, which would cover only this "
                "worker's samples; make the metrics that it wraps attributes of the module, "
                "and log those",
            )
