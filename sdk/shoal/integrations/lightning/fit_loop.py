"""Fit loop for a Lightning module. The loop itself works as in ordinary scripts with Shoal (an
`ElasticDataLoader`, `as_distributed`, `if optimizer.step():`). It calls user code (`training_step`,
hooks, callbacks, schedules, logging and validation) at the same points as Lightning's own loop.

Only the loader counts steps and epochs; Lightning's counters are set from it. An aborted step is
therefore not counted, and a worker that joins has the same counts as the other workers.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops import _FitLoop, _TrainingEpochLoop
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from shoal_common.errors import ConfigurationError
from shoal_worker import api
from shoal_worker.data.loader import ElasticDataLoader
from shoal_worker.elastic.contract.step import Step
from shoal_worker.elastic.session import collectives
from shoal_worker.elastic.session.worker_process import current_session
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.optimizer import ShardedOptimizer

from shoal.integrations.in_step import InStep
from shoal.integrations.lightning.checkpoints import Checkpoints
from shoal.integrations.lightning.data import training_loader
from shoal.integrations.lightning.evaluation import ElasticEvaluation
from shoal.integrations.lightning.fit_state import Progress
from shoal.integrations.lightning.metrics import Metrics
from shoal.integrations.lightning.results import Held, Missing, Results, check_alike


class Trains(Protocol):
    """Interface of a strategy, as used by the fit loop."""

    seed: int
    options: Mapping[str, Any]

    @property
    def sharded(self) -> ShardedModel:
        """The distributed model being trained."""
        ...

    @property
    def optimizer(self) -> ShardedOptimizer:
        """The optimizer of the distributed model."""
        ...

    def note_who_writes(self) -> None:
        """Tells Lightning's loggers whether this process writes logs."""
        ...


class _Counters(_TrainingEpochLoop):
    """Lightning's counters of steps and batches, set from the loader's counts."""

    def __init__(self, trainer: pl.Trainer, before: _TrainingEpochLoop) -> None:
        """`before`: the Trainer's loop that this loop replaces. Its arguments are used for this
        loop."""
        super().__init__(trainer, min_steps=before.min_steps, max_steps=before.max_steps)
        self._results: Results = Results(training=True)
        self.val_loop: ElasticEvaluation = ElasticEvaluation(trainer, before.val_loop)

    def stand(self, *, in_epoch: int, of: float, in_all: int, committed: int) -> None:
        """Sets Lightning's counters.

        Args:
            in_epoch: number of the current step in its epoch, from 1.
            of: number of steps in the epoch.
            in_all: number of steps begun since the start of training.
            committed: number of these steps that were committed.
        """
        progress = self.batch_progress
        for counts, value in ((progress.current, in_epoch), (progress.total, in_all)):
            counts.ready = counts.started = counts.processed = counts.completed = value
        progress.is_last_batch = in_epoch >= of
        steps = self.automatic_optimization.optim_progress.optimizer.step
        steps.total.ready = steps.total.completed = committed
        self._batches_that_stepped = in_all - 1


class ElasticFit(_FitLoop):
    """Fit loop that replaces a Trainer's own fit loop, for one fit."""

    def __init__(
        self, trainer: pl.Trainer, strategy: Trains, checkpoints: Checkpoints | None
    ) -> None:
        before = trainer.fit_loop
        super().__init__(trainer, min_epochs=before.min_epochs, max_epochs=before.max_epochs)
        self.epoch_loop: _Counters = _Counters(trainer, before.epoch_loop)
        self._data_source = before._data_source
        self._strategy = strategy
        self._checkpoints = None if trainer.fast_dev_run else checkpoints
        self._accumulated = trainer.accumulate_grad_batches
        self._loader: ElasticDataLoader | None = None
        self._in_step = InStep(current_session())
        self._is_new = True
        # the loader splits a step into micro-batches, so Lightning sees one batch per step
        trainer.accumulate_grad_batches = 1

    def setup_data(self) -> None:
        """Requests the loader, on the first call only. Called by Lightning, including for
        `estimated_stepping_batches`."""
        if self._loader is not None:
            return
        trainer = self.trainer
        given = _request_dataloader(self._data_source)
        self._loader = training_loader(
            given,
            accumulated=self._accumulated,
            seed=self._strategy.seed,
            deterministic=bool(self._strategy.options.get("deterministic")),
            # With an ElasticDataLoader, max_steps ends the loop. fast_dev_run sets max_steps too.
            limit=1.0
            if trainer.fast_dev_run and isinstance(given, ElasticDataLoader)
            else trainer.limit_train_batches,
            in_order=trainer.overfit_batches > 0,
        )
        self._combined_loader = CombinedLoader(self._loader, "max_size_cycle")
        self.max_batches = len(self._loader)
        interval = trainer.val_check_interval
        trainer.val_check_batch = (
            interval if isinstance(interval, int) else max(1, int(self.max_batches * interval))
        )
        if (
            trainer.check_val_every_n_epoch is not None
            and trainer.val_check_batch > self.max_batches
            and trainer.enable_validation
        ):
            raise ConfigurationError(
                f"val_check_interval={interval}, but an epoch has only {self.max_batches} steps; "
                "use at most that, or set check_val_every_n_epoch=None to count across epochs"
            )

    @property
    def loader(self) -> ElasticDataLoader:
        """Loader of the training steps."""
        self.setup_data()
        assert self._loader is not None
        return self._loader

    # ------------------------------------------------------------------------------------ the loops

    def run(self) -> None:
        """Trains until all epochs or steps are done, a callback stops training, or the job is
        stopped."""
        loader, session, counters = self.loader, current_session(), self.epoch_loop
        torch.set_grad_enabled(True)
        counters._results.attach(Metrics(self.trainer.lightning_module))
        session.registered.register("lightning", Progress(self.trainer, counters._results))
        if self._checkpoints is not None and self._checkpoints.resume:
            api.resume(self._checkpoints.directory)
        max_epochs: int = self.max_epochs
        max_steps = counters.max_steps
        remaining = loader.epochs(
            sys.maxsize if max_epochs < 0 else max_epochs,
            max_steps=max_steps if max_steps >= 0 else None,
        )
        # from here on, a joining worker has the other workers' state
        first = next(remaining, None)
        self._stand(loader.epoch)
        self._strategy.note_who_writes()
        self.on_run_start()
        for epoch in itertools.chain([] if first is None else [first], remaining):
            if self._is_enough():
                break
            self._train_epoch(epoch)
            if self._is_enough():
                break
        finished = self._is_enough() or 0 <= max_epochs <= loader.epoch
        if not finished and self._checkpoints is not None:
            self._checkpoints.save()  # all have been asked to leave
        self.on_run_end()

    def _is_enough(self) -> bool:
        steps = self.epoch_loop.max_steps
        return 0 <= steps <= self.loader.global_step or bool(
            self.trainer.should_stop and self._can_stop_early
        )

    def _stand(self, epoch: int) -> None:
        """Sets Lightning's epoch counters for the next step. `epoch`: current epoch of the
        loader."""
        for counts in (self.epoch_progress.current, self.epoch_progress.total):
            counts.ready = counts.started = epoch + 1
            counts.processed = counts.completed = epoch

    def _train_epoch(self, epoch: int) -> None:
        trainer, loader, session = self.trainer, self.loader, current_session()
        self._stand(epoch)
        self.epoch_loop._results.take_elsewhere()
        call._call_callback_hooks(trainer, "on_train_epoch_start")
        call._call_lightning_module_hook(trainer, "on_train_epoch_start")
        over = False
        for step in loader.steps():
            self._strategy.note_who_writes()
            self.epoch_loop.stand(
                in_epoch=step.number + 1,
                of=self.max_batches,
                in_all=loader.global_step + 1,
                committed=loader.global_step,
            )
            committed, results = self._train_step(step, step.number)
            if committed:
                over = step.number + 1 >= self.max_batches
                self._step_is_over(step.number, results)
                if self._is_enough():
                    break
                if self._checkpoints is not None and not over:
                    self._checkpoints.step_is_over()
        if (
            session.is_joining
            or session.is_redoing
            or (loader.epoch <= epoch and not over and not self._is_enough())
        ):
            return  # steps will be repeated, or the job was stopped within the epoch
        self._epoch_is_over(epoch)

    def _train_step(self, batches: Iterable[Any], number: int) -> tuple[bool, tuple[Any, Any]]:
        """Performs one step on all ranks.

        Returns whether the step was committed, which is the same on all ranks. If the step was
        aborted, the loader deals its samples again. Also returns the outputs of `training_step` and
        the batch, for hooks. Both are None if the step was aborted, or if this rank got no batch.
        """
        trainer, session, strategy, results = (
            self.trainer,
            current_session(),
            self._strategy,
            self.epoch_loop._results,
        )
        optimizer, outputs, batch = strategy.optimizer, {}, None
        losses: list[tuple[float, float]] = []
        around = Held(-1, lambda: 1.0)  # results logged by hooks that run before or after the parts
        encoded: list[dict[str, Any]] = []
        results.hold(around)
        for fetched in batches:
            batch = self._to_device(fetched)
            if not losses:
                self._step_begins(batch, number)
            weight = (session.step.micro_batch or 0.0) if session.step is not None else 1.0
            held = Held(
                (session.step.micro_batch_index or 0) if session.step is not None else 0,
                functools.partial(float, weight),
            )
            results.hold(held)
            results.metrics_of_module.empty()
            output = call._call_strategy_hook(
                trainer,
                "training_step",
                *self.epoch_loop._build_kwargs(OrderedDict(), batch, number).values(),
            )
            closed = ClosureResult.from_training_step_output(output)
            if closed.closure_loss is None:
                raise ConfigurationError(
                    "training_step returned None, but a rank cannot skip a step in which the "
                    "others take part; return a loss of zero (0.0 * loss)"
                )
            call._call_strategy_hook(trainer, "backward", closed.closure_loss, optimizer)
            counted = results.metrics_of_module.take()
            encoded.append(held.encode(counted if weight > 0 else {}))
            results.hold(around)
            outputs = closed.extra
            losses.append((float(closed.closure_loss.detach()), weight))
            weights = sum(each for _, each in losses)
            if session.step is not None and weights > 0:
                session.step.loss = sum(loss * each for loss, each in losses) / weights
        if not losses:
            self._step_begins(None, number)
        call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
        if trainer.gradient_clip_val:
            strategy.sharded.clip_grad_norm_(float(trainer.gradient_clip_val))
        step, ranks = session.step, session.world_size
        own = {
            "new": self._is_new,
            "elsewhere": results.take_elsewhere(),
            "parts": [around.encode({}), *encoded],
            "losses": losses,
        }
        everyones = self._in_step.gather(own, kind="self.log")
        committed = bool(optimizer.step())
        call._call_callback_hooks(trainer, "on_before_zero_grad", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_zero_grad", optimizer)
        optimizer.zero_grad()
        results.hold(None)
        if not committed:
            return False, (None, None)
        mean_loss = step.mean_loss if step is not None else None
        self._log(results, own, everyones, step, ranks)
        loss = torch.tensor(math.nan if mean_loss is None else mean_loss)
        return True, ({"loss": loss, **outputs} if losses else None, batch)

    def _log(
        self,
        results: Results,
        own: dict[str, Any],
        everyones: list[Any] | None,
        step: Step | None,
        ranks: int,
    ) -> None:
        """Logs the combined values of a committed step. Called on every rank. Also checks that the
        ranks have logged the same values outside of steps since the previous step.

        Args:
            results: results to which the values are added.
            own: values of this rank.
            everyones: values of all ranks, gathered within the step. None if a rank died during the
                exchange; even then, other ranks may have received the values.
            step: the step; None if this process has no step in progress, as when it replays its
                script.
            ranks: number of ranks that took part in the step.
        """
        reports, missing = everyones, None
        if any(collectives.gather(current_session(), everyones is None, kind="self.log")):
            answers = collectives.gather(
                current_session(), {"own": own, "everyones": everyones}, kind="self.log"
            )
            reports = next(
                (answer["everyones"] for answer in answers if answer["everyones"] is not None), None
            )
            if reports is None:
                reports = [answer["own"] for answer in answers]
                missing = (
                    None
                    if step is None or len(reports) == ranks
                    else Missing(step.mean_loss, step.weight_of_all)
                )
        assert reports is not None
        self._is_new = False
        # A new worker has not logged the values that the others logged after the previous step.
        if known := [one["elsewhere"] for one in reports if not one["new"]]:
            check_alike(known)
        losses = [pair for one in reports for pair in one["losses"]]
        results.log_step(
            [part for one in reports for part in one["parts"]], missing=missing, losses=losses
        )

    def _to_device(self, batch: Any) -> Any:
        trainer = self.trainer
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)

    def _step_begins(self, batch: Any, number: int) -> None:
        trainer = self.trainer
        trainer._logger_connector.on_batch_start(batch)
        call._call_callback_hooks(trainer, "on_train_batch_start", batch, number)
        if call._call_lightning_module_hook(trainer, "on_train_batch_start", batch, number) == -1:
            raise ConfigurationError(
                "on_train_batch_start returned -1 to skip the rest of the epoch, which is "
                "not supported because all ranks would have to skip it from the same step; "
                "set trainer.should_stop on all ranks at once, or use a smaller dataset"
            )
        call._call_strategy_hook(trainer, "on_train_batch_start", batch, number)

    # --------------------------------------------------------------------- ends of steps and epochs

    def _step_is_over(self, number: int, results: tuple[Any, Any]) -> None:
        """Performs the actions that Lightning performs after a step, in Lightning's order. Called
        after a committed step."""
        trainer, counters, (outputs, batch) = self.trainer, self.epoch_loop, results
        in_all = self.loader.global_step
        counters.stand(in_epoch=number + 1, of=self.max_batches, in_all=in_all, committed=in_all)
        counters.update_lr_schedulers("step", update_plateau_schedulers=False)
        if counters._num_ready_batches_reached():
            counters.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        updates = counters._results.metrics_of_module.updates()
        call._call_callback_hooks(trainer, "on_train_batch_end", outputs, batch, number)
        call._call_lightning_module_hook(trainer, "on_train_batch_end", outputs, batch, number)
        self._check_untouched(updates)
        trainer._logger_connector.on_batch_end()
        trainer._logger_connector.update_train_step_metrics()
        if counters._should_check_val_fx(None):
            trainer.validating = True
            within = trainer._logger_connector._first_loop_iter
            counters.val_loop.run()
            trainer.training = True
            trainer._logger_connector._first_loop_iter = within
        counters.update_lr_schedulers("step", update_plateau_schedulers=True)
        counters._batches_that_stepped = in_all

    def _check_untouched(self, before: Mapping[str, int]) -> None:
        """Raises ConfigurationError if a hook has updated a metric, because the metric would then
        include only this worker's samples."""
        now = self.epoch_loop._results.metrics_of_module.updates()
        for name in now:
            if now[name] > before.get(name, 0):
                raise ConfigurationError(
                    f"{name}, a torchmetrics module, was updated in on_train_batch_end, which sees "
                    "only part of this worker's samples; update it in training_step, which covers "
                    "the samples of all workers"
                )

    def _epoch_is_over(self, epoch: int) -> None:
        """Performs the actions that Lightning performs at the end of an epoch, in Lightning's
        order. Also called when training ends in the middle of an epoch."""
        trainer, counters = self.trainer, self.epoch_loop
        trainer._logger_connector.epoch_end_reached()
        for counts in (self.epoch_progress.current, self.epoch_progress.total):
            counts.processed = epoch + 1
        call._call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=False)
        call._call_lightning_module_hook(trainer, "on_train_epoch_end")
        check_alike(collectives.gather(current_session(), counters._results.take_elsewhere()))
        call._call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=True)
        trainer._logger_connector.on_epoch_end()
        if counters._num_ready_batches_reached():
            counters.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        counters._batches_that_stepped -= 1
        trainer._logger_connector.update_train_epoch_metrics()
        counters._batches_that_stepped += 1
        for counts in (self.epoch_progress.current, self.epoch_progress.total):
            counts.completed = epoch + 1
        if self._checkpoints is not None:
            self._checkpoints.step_is_over()
            self._checkpoints.epoch_is_over()
