"""Strategy for a Lightning Trainer: `Trainer(strategy=ShoalStrategy("zero2"))`.

Lightning treats each worker as a single process on `shoal.device()`, which neither opens a process
group nor waits for other processes. Before training, the Trainer's fit loop is replaced by Shoal's
(`fit_loop.py`), and unsupported uses are rejected (`refusals.py`,
docs/decisions/0263-own-loops-for-trainers.md).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from shoal_common.errors import ConfigurationError, PreconditionError, UnavailableError
from shoal_worker import api
from shoal_worker.elastic.session import collectives
from shoal_worker.elastic.session.worker_process import current_session
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.optimizer import ShardedOptimizer

from shoal.integrations.lightning.checkpoints import Checkpoints
from shoal.integrations.lightning.evaluation import ElasticEvaluation, ElasticPrediction
from shoal.integrations.lightning.fit_loop import ElasticFit
from shoal.integrations.lightning.preparing import prepare_data
from shoal.integrations.lightning.refusals import (
    STRATEGIES,
    check_metrics,
    check_trainer,
    use_checkpoints,
)


class ShoalStrategy(Strategy):
    """Trains and evaluates a LightningModule on the workers of a job. Workers may die, leave and
    join during training.

    Every rank must create the Trainer and call the same methods in the same order: `fit`, at most
    once, and then `validate`, `test` and `predict`.
    """

    strategy_name = "shoal"

    def __init__(self, strategy: str = "ddp", *, seed: int = 0, **options: Any) -> None:
        """
        Args:
            strategy: "ddp", "zero1", "zero2", "zero3", "fsdp" or "hsdp".
            seed: seed for each batch's random numbers and, if the Trainer receives a DataLoader
                with shuffle=True, for the order of samples.
            options: further arguments of `shoal.as_distributed`.

        Raises:
            ConfigurationError: a different strategy.
        """
        super().__init__()
        if strategy not in STRATEGIES:
            raise ConfigurationError(
                f"ShoalStrategy({strategy!r}): expected one of {', '.join(STRATEGIES)}; write your "
                "own loop for the others (docs/migration)"
            )
        self.name = strategy
        self.seed = seed
        self.options: Mapping[str, Any] = options
        self._checkpoints: Checkpoints | None = None
        self._sharded: ShardedModel | None = None
        self._module: pl.LightningModule | None = None
        """Module that the distributed model was created from."""

    # -------------------------------------------------------------- properties that Lightning reads

    @property
    def root_device(self) -> torch.device:
        """Device of this process, `shoal.device()`."""
        return current_session().device

    @property
    def is_global_zero(self) -> bool:
        """True if this process writes files and logs. If it dies, another process takes over."""
        return current_session().is_first

    @property
    def global_rank(self) -> int:
        """0 in the process that writes files and logs, otherwise a positive number."""
        session = current_session()
        return 0 if session.is_first else max(1, session.rank)

    @property
    def local_rank(self) -> int:
        """Rank on this machine as reported to Lightning: the same as `global_rank`."""
        return self.global_rank

    @property
    def world_size(self) -> int:
        """Number of processes as reported to Lightning: always 1, since Lightning treats each
        process as a separate job. `shoal.world_size()` returns the number of ranks."""
        return 1

    def note_who_writes(self) -> None:
        """Sets Lightning's `rank_zero_only.rank`, which loggers use to determine whether to
        write."""
        rank_zero_only.rank = self.global_rank

    # ------------------------------------------------------------------------------------ the model

    @property
    def sharded(self) -> ShardedModel:
        """The distributed model being trained.

        Raises:
            PreconditionError: neither a fit nor an evaluation has started.
        """
        if self._sharded is None:
            raise PreconditionError(
                "ShoalStrategy.sharded does not exist before fit() has begun; use it in "
                "on_fit_start or later"
            )
        return self._sharded

    @property
    def optimizer(self) -> ShardedOptimizer:
        """The optimizer of the distributed model."""
        (optimizer,) = self.optimizers
        assert isinstance(optimizer, ShardedOptimizer)
        return optimizer

    def setup_environment(self) -> None:
        """Rejects unsupported uses before Lightning prepares anything. Called by Lightning."""
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        check_trainer(trainer)
        if trainer.state.fn is TrainerFn.FITTING and self._sharded is not None:
            raise PreconditionError(
                "fit() was called after another fit(), validate(), test() or predict() in "
                "this process, but a process of a job can call fit() only once, before the "
                "others; start another job for another fit"
            )
        if self._module is not None and self._module is not module:
            raise PreconditionError(
                f"Trainer.{trainer.state.fn.value}() was called with a different "
                f"{type(module).__name__} than before, but a job's process has one model; omit the "
                "model, or start another job for it"
            )
        if trainer.state.fn is TrainerFn.FITTING:
            self._checkpoints = use_checkpoints(trainer)
            trainer.num_sanity_val_steps = (
                0  # the other workers would have to wait while a joining worker runs it
            )
        connector: Any = trainer._data_connector
        connector.prepare_data = functools.partial(prepare_data, trainer)
        self.note_who_writes()
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """Replaces the Trainer's loops with Shoal's loops, and distributes the model and the
        optimizer. Called by Lightning when the module is complete."""
        module = self.lightning_module
        assert self.accelerator is not None
        assert module is not None
        self.accelerator.setup(trainer)
        check_metrics(module)
        if trainer.state.fn is TrainerFn.FITTING:
            self._set_up_fit(trainer, module)
        else:
            self._set_up_evaluation(trainer, module)
        self._module = module

    def _set_up_fit(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.model_to_device()
        trainer.fit_loop = ElasticFit(trainer, self, self._checkpoints)
        self.setup_optimizers(trainer)
        optimizers: list[Any] = self._optimizers
        if len(optimizers) != 1 or isinstance(optimizers[0], _MockOptimizer):
            raise ConfigurationError(
                f"{type(module).__name__}.configure_optimizers returned "
                f"{'no' if len(optimizers) == 1 else len(optimizers)} optimizers, but "
                "ShoalStrategy expects one; use parameter groups, or write your own loop "
                "(docs/guides/several-models.md)"
            )
        model, optimizer = api.as_distributed(
            module, optimizers[0], strategy=self.name, **self.options
        )
        assert isinstance(model, ShardedModel)
        self._sharded = self.model = model
        self.optimizers = [optimizer]

    def _set_up_evaluation(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.validate_loop = ElasticEvaluation(trainer, trainer.validate_loop)
        trainer.test_loop = ElasticEvaluation(trainer, trainer.test_loop)
        trainer.predict_loop = ElasticPrediction(trainer, trainer.predict_loop)
        if self._sharded is None:
            self.model_to_device()
            backend = {name: value for name, value in self.options.items() if name == "backend"}
            # there is no training, so each rank has the unsharded model, as needed for evaluations
            model = api.as_distributed(module, **backend)
            assert isinstance(model, ShardedModel)
            self._sharded = model
        self.model = self._sharded

    def model_to_device(self) -> None:
        """Moves the module to its device. Called by Lightning."""
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    def teardown(self) -> None:
        """Cleans up at the end of a fit. Called by Lightning. The model stays on its device, since
        its parameters may be sharded."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()

    # ---------------------------------------------------------------------------------- collectives

    def barrier(self, name: str | None = None) -> None:
        """Does nothing, since Shoal synchronizes the ranks."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns `obj`. Lightning broadcasts only paths, and only the process that writes files
        uses them."""
        return obj

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> NoReturn:
        """Rejects the call; user code must call `shoal.all_reduce` instead.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "strategy.reduce is not supported; call shoal.all_reduce(value, op) between steps, on "
            "every rank"
        )

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> NoReturn:
        """Rejects the call; user code must call `shoal.gather` instead.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "self.all_gather is not supported; call shoal.gather(value) between steps, on every "
            "rank"
        )

    # ---------------------------------------------------------------------------------------- files

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the unsharded model's state under the module's own names. Must be called on every
        rank."""
        return (
            self._sharded.full_state_dict()
            if self._sharded is not None
            else super().lightning_module_state_dict()
        )

    def optimizer_state(self, optimizer: Any) -> NoReturn:
        """Rejects the call; Shoal's checkpoints contain the optimizer's state.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "trainer.save_checkpoint(path) cannot save the state of training; use the callback "
            "shoal.integrations.lightning.Checkpoints(directory), or pass weights_only=True to "
            "save only the model"
        )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Writes the state gathered by `trainer.save_checkpoint(path, weights_only=True)` to a
        file. Must be called on every rank; one process writes the file.

        Raises:
            UnavailableError (FILE_NOT_WRITTEN): that process died before it had written the file.
        """
        writes = self.is_global_zero
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if not any(collectives.gather(current_session(), writes)):
            raise UnavailableError(
                f"{filepath}: the worker that was writing the file died; save it again",
                reason="FILE_NOT_WRITTEN",
            )

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a file written by `trainer.save_checkpoint`, or the newest checkpoint in the
        directory of a `Checkpoints`. Called by Lightning for `validate`, `test` and `predict` with
        `ckpt_path`.

        Raises:
            ConfigurationError: loading would resume a fit, or replace weights trained in this
                process.
        """
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn is TrainerFn.FITTING:
            raise ConfigurationError(
                f"fit(ckpt_path={str(checkpoint_path)!r}): training resumes only from Shoal's "
                "checkpoints; pass the Trainer the callback "
                "shoal.integrations.lightning.Checkpoints(directory, resume=True), and omit "
                "ckpt_path"
            )
        if self._sharded is not None:
            raise ConfigurationError(
                f"ckpt_path={str(checkpoint_path)!r}: this process already has a model, whose "
                "weights may be sharded; omit ckpt_path to evaluate that model, or evaluate the "
                "checkpoint in another job"
            )
        if Path(checkpoint_path).is_dir():
            return {
                "state_dict": api.load_full_state(checkpoint_path),
                "pytorch-lightning_version": pl.__version__,
            }
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        return loaded
