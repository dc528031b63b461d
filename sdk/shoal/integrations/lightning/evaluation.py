"""Lightning's validation with the batches dealt to all ranks: those of one that dies, again. All ranks get the same metrics."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.loops import _EvaluationLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from shoal_worker.elastic.evaluation import evaluate
from shoal_worker.elastic.worker_process import current_session
from torch import nn

from shoal.integrations.lightning.data import validation_loader
from shoal.integrations.lightning.results import Results
from shoal.integrations.numbered import numbered

if TYPE_CHECKING:
    from shoal_worker.data.loader import ElasticDataLoader


class ElasticValidation(_EvaluationLoop):
    """The validation within a fit. Hooks of single batches are called on the rank that evaluates the batch; all others on all ranks."""

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False, inference_mode=False)
        self._results: Results = Results(training=False)
        self._loader: ElasticDataLoader | None = None
        self._logged_outputs: list[Any] = []

    def setup_data(self) -> None:
        """Lightning calls it: asks for the loader, once."""
        trainer = self.trainer
        if self._loader is not None or trainer.limit_val_batches == 0 or not is_overridden("validation_step", trainer.lightning_module):
            return
        self._loader = validation_loader(_request_dataloader(self._data_source))
        self._combined_loader = CombinedLoader(self._loader, "sequential")
        self._max_batches = [len(self._loader)]

    def run(self) -> list[Any]:
        """Evaluates; every rank calls it, behind a step that counts."""
        self.setup_data()
        if self.skip:
            return []
        assert self._loader is not None
        trainer, session = self.trainer, current_session()
        trainer._logger_connector.epoch_end_reached()
        self._has_run, self._logged_outputs = False, []
        self.batch_progress.reset_on_run()
        self.on_run_start()
        model = trainer.strategy.model
        assert model is not None
        sums = evaluate(session, model, numbered(self._loader.evaluation_batches()), self._measure)
        for known in sorted(name.removeprefix("value ") for name in sums if name.startswith("value ")):
            weight = sums[f"weight {known}"]
            self._results.log_mean(known, sums[f"value {known}"] / weight, 1.0)
        self._store_dataloader_outputs()
        self._has_run = True
        outputs: list[Any] = self.on_run_end()
        return outputs

    def _measure(self, _: nn.Module, one: tuple[int, Any]) -> dict[str, float]:
        """Sums of what `validation_step` logs of one batch, by what it is logged as."""
        number, batch = one
        trainer, results = self.trainer, self._results
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        results.hold()
        results.weigh(float(extract_batch_size(batch)))
        call._call_callback_hooks(trainer, "on_validation_batch_start", batch, number)
        call._call_lightning_module_hook(trainer, "on_validation_batch_start", batch, number)
        takes_number = len(inspect.signature(trainer.lightning_module.validation_step).parameters) > 1
        output = call._call_strategy_hook(trainer, "validation_step", batch, *([number] if takes_number else []))
        call._call_callback_hooks(trainer, "on_validation_batch_end", output, batch, number)
        call._call_lightning_module_hook(trainer, "on_validation_batch_end", output, batch, number)
        sums: dict[str, float] = {}
        for known, values in results.release().items():
            sums[f"value {known}"] = sum(value * weight for value, weight in values)
            sums[f"weight {known}"] = sum(weight for _, weight in values)
        return sums
