"""Lightning's validation, test and prediction, with batches distributed across all ranks. If a rank
dies, its batches are evaluated again.

Each rank evaluates its batches, and the results are gathered. Every rank then logs the results of
all batches in order, as a single process would. A hook for one batch is called on the rank that
evaluates the batch; all other hooks are called on every rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loops import _EvaluationLoop, _PredictionLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from shoal_worker.elastic.session import collectives
from shoal_worker.elastic.session.worker_process import current_session

from shoal.integrations.dealt import evaluate_on_all
from shoal.integrations.lightning.data import evaluation_loaders, samples_in
from shoal.integrations.lightning.metrics import Metrics
from shoal.integrations.lightning.results import Held, Results, check_alike

if TYPE_CHECKING:
    from shoal_worker.data.loader import ElasticDataLoader


def _on_device(trainer: pl.Trainer, batch: Any, loader: int) -> Any:
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=loader)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=loader)


class ElasticEvaluation(_EvaluationLoop):
    """Evaluation loop that replaces one of the Trainer's own loops: for validation within a fit,
    for `validate`, or for `test`."""

    def __init__(self, trainer: pl.Trainer, before: _EvaluationLoop) -> None:
        """`before`: the Trainer's loop that this loop replaces. This loop uses its loaders."""
        super().__init__(
            trainer, before._trainer_fn, before._stage, verbose=before.verbose, inference_mode=False
        )
        self._data_source = before._data_source
        self._results: Results = Results(training=False)
        self._loaders: list[ElasticDataLoader] = []
        self._logged_outputs: list[Any] = []

    def setup_data(self) -> None:
        """Requests the loaders, on the first call only. Called by Lightning."""
        trainer, kind = self.trainer, self._stage.dataloader_prefix
        step = "test_step" if self._stage is RunningStage.TESTING else "validation_step"
        limit = getattr(trainer, f"limit_{kind}_batches")
        if self._loaders or limit == 0 or not is_overridden(step, trainer.lightning_module):
            return
        in_order = self._trainer_fn is TrainerFn.FITTING and trainer.overfit_batches > 0
        self._loaders = evaluation_loaders(
            _request_dataloader(self._data_source),
            f"{kind}_dataloaders",
            limit=limit,
            in_order=in_order,
        )
        self._combined_loader = CombinedLoader(self._loaders, "sequential")
        self._max_batches = [len(loader) for loader in self._loaders]

    def run(self) -> list[Any]:
        """Evaluates all batches and returns the logged results. Must be called on every rank,
        between steps."""
        self.setup_data()
        if self.skip:
            return []
        trainer, session, results = self.trainer, current_session(), self._results
        results.attach(Metrics(trainer.lightning_module))
        results.take_elsewhere()
        trainer._logger_connector.epoch_end_reached()
        self._has_run, self._logged_outputs = False, []
        self.batch_progress.reset_on_run()
        if self._trainer_fn is not TrainerFn.FITTING:
            self._seen_batches_per_dataloader.clear()
        self.on_run_start()
        model = trainer.strategy.model
        assert model is not None
        for number, loader in enumerate(self._loaders):
            if number > 0:
                self._store_dataloader_outputs()
            measure = functools.partial(self._measure, number)
            _, answers = evaluate_on_all(
                session, model, loader.evaluation_batches(), measure, gathers=True
            )
            trainer._logger_connector.epoch_end_reached()
            results.dataloader_idx = number if len(self._loaders) > 1 else None
            self._has_run = True
            results.metrics_of_module.add([one["counted"] for one in answers])
            for one in answers:
                trainer._logger_connector._first_loop_iter = self.batch_progress.current.ready == 0
                self.batch_progress.increment_ready()
                results.log_batch(one)
                self.batch_progress.increment_completed()
                trainer._logger_connector.update_eval_step_metrics(
                    self._seen_batches_per_dataloader[number]
                )
                self._seen_batches_per_dataloader[number] += 1
        self._store_dataloader_outputs()
        outputs: list[Any] = self.on_run_end()
        return outputs

    def _on_evaluation_epoch_end(self) -> None:
        """Calls the end-of-epoch hooks, and checks that their logged values are the same on all
        ranks. Called by Lightning."""
        super()._on_evaluation_epoch_end()
        check_alike(collectives.gather(current_session(), self._results.take_elsewhere()))

    def _measure(self, loader: int, number: int, batch: Any) -> tuple[dict[str, float], Any]:
        """Evaluates one batch. Returns its logged values and its contribution to metrics."""
        trainer, results = self.trainer, self._results
        batch = _on_device(trainer, batch, loader)
        several = [loader] if len(self._loaders) > 1 else []
        kind = "test" if trainer.testing else "validation"
        held = Held(number, lambda: float(extract_batch_size(batch)))
        results.metrics_of_module.empty()
        results.hold(held)
        call._call_callback_hooks(trainer, f"on_{kind}_batch_start", batch, number, *several)
        call._call_lightning_module_hook(trainer, f"on_{kind}_batch_start", batch, number, *several)
        arguments = self._build_step_args_from_hook_kwargs(
            self._build_kwargs(batch, number, loader if several else None), f"{kind}_step"
        )
        output = call._call_strategy_hook(trainer, f"{kind}_step", *arguments)
        call._call_callback_hooks(trainer, f"on_{kind}_batch_end", output, batch, number, *several)
        call._call_lightning_module_hook(
            trainer, f"on_{kind}_batch_end", output, batch, number, *several
        )
        results.hold(None)
        return {}, held.encode(results.metrics_of_module.take())


class ElasticPrediction(_PredictionLoop):
    """Prediction loop that replaces the Trainer's own loop. All ranks return the predictions of all
    batches."""

    def __init__(self, trainer: pl.Trainer, before: _PredictionLoop) -> None:
        """`before`: the Trainer's loop that this loop replaces. This loop uses its loaders."""
        super().__init__(trainer, inference_mode=False)
        self._data_source = before._data_source
        self._return_predictions = before._return_predictions
        self._loaders: list[ElasticDataLoader] = []
        self._sizes: list[int] = []
        """Number of samples per batch of each loader."""

    def setup_data(self) -> None:
        """Requests the loaders, on the first call only. Called by Lightning."""
        limit = self.trainer.limit_predict_batches
        if self._loaders or limit == 0:
            return
        self._loaders = evaluation_loaders(
            _request_dataloader(self._data_source), "predict_dataloaders", limit=limit
        )
        self._combined_loader = CombinedLoader(self._loaders, "sequential")
        self.max_batches = [len(loader) for loader in self._loaders]
        self._sizes = [samples_in(loader) for loader in self._loaders]

    def run(self) -> Any:
        """Computes all predictions. Must be called on every rank, between steps."""
        self.setup_data()
        if self.skip:
            return None
        trainer, session = self.trainer, current_session()
        writers = [one for one in trainer.callbacks if isinstance(one, BasePredictionWriter)]
        gathers = self.return_predictions or any(one.interval.on_epoch for one in writers)
        self.batch_progress.reset_on_run()
        self.on_run_start()
        model = trainer.strategy.model
        assert model is not None
        self._predictions, self.epoch_batch_indices = [], []
        for number, loader in enumerate(self._loaders):
            measure = functools.partial(self._measure, number)
            _, answers = evaluate_on_all(
                session, model, loader.evaluation_batches(), measure, gathers=gathers
            )
            self._predictions.append(answers)
            self.epoch_batch_indices.append(
                [self._samples_of(number, batch) for batch in range(len(answers))]
            )
        return self.on_run_end()

    def _samples_of(self, loader: int, batch: int) -> list[int]:
        """Returns the dataset indices of the samples in a batch."""
        size = self._sizes[loader]
        return list(
            range(batch * size, min((batch + 1) * size, len(self._loaders[loader].dataset)))
        )

    def _measure(self, loader: int, number: int, batch: Any) -> tuple[dict[str, float], Any]:
        """Computes the predictions of one batch."""
        trainer = self.trainer
        batch = _on_device(trainer, batch, loader)
        several = [loader] if len(self._loaders) > 1 else []
        self.current_batch_indices = self._samples_of(loader, number)
        with _without_writers(trainer, current_session().is_joining):
            call._call_callback_hooks(trainer, "on_predict_batch_start", batch, number, *several)
            call._call_lightning_module_hook(
                trainer, "on_predict_batch_start", batch, number, *several
            )
            arguments = self._build_step_args_from_hook_kwargs(
                self._build_kwargs(batch, number, loader if several else None), "predict_step"
            )
            predicted = call._call_strategy_hook(trainer, "predict_step", *arguments)
            call._call_callback_hooks(
                trainer, "on_predict_batch_end", predicted, batch, number, *several
            )
            call._call_lightning_module_hook(
                trainer, "on_predict_batch_end", predicted, batch, number, *several
            )
        return {}, move_data_to_device(predicted, torch.device("cpu"))

    def _on_predict_epoch_end(self) -> Any:
        """Calls the hooks for the end of the epoch with all predictions. Called by Lightning.
        Prediction writers are called in a single process. If that process dies during the call,
        they are called in another one."""
        trainer, session = self.trainer, current_session()
        with _without_writers(trainer, True):
            result = super()._on_predict_epoch_end()
        writers = [one for one in trainer.callbacks if isinstance(one, BasePredictionWriter)]
        written = not any(one.interval.on_epoch for one in writers)
        while not written:
            writes = session.is_first
            for one in writers if writes else ():
                one.on_predict_epoch_end(trainer, trainer.lightning_module)
            written = any(collectives.gather(session, writes)) or session.is_joining
        return result


@contextlib.contextmanager
def _without_writers(trainer: pl.Trainer, said: bool) -> Iterator[None]:
    """Removes the prediction writers from the Trainer's callbacks within the block. Does nothing if
    `said` is False."""
    before = trainer.callbacks
    trainer.callbacks = [
        one for one in before if not (said and isinstance(one, BasePredictionWriter))
    ]
    try:
        yield
    finally:
        trainer.callbacks = before
