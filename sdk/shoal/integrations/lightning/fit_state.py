"""Registers a fit's state, so that joiners receive it and checkpoints contain it. Steps and epochs
are not included; the loader stores them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.call import _call_callbacks_state_dict

from shoal.integrations.lightning.results import Results

_METRICS = ("_callback_metrics", "_logged_metrics")


class Progress:
    """Registered state of a fit: the epoch's sums of logged values, the states of torchmetrics
    modules, the metrics of the last epoch, and the states of callbacks."""

    def __init__(self, trainer: pl.Trainer, results: Results) -> None:
        self._trainer = trainer
        self._results = results

    def state_dict(self) -> dict[str, Any]:
        connector = self._trainer._logger_connector
        counted = {
            "results": self._results.state_dict(),
            "metrics": [
                {name: float(value) for name, value in getattr(connector, each).items()}
                for each in _METRICS
            ],
            "should_stop": bool(self._trainer.should_stop),
        }
        return {
            "counted": json.dumps(counted),
            "modules": self._results.metrics_of_module.state_dict(),
            "callbacks": _call_callbacks_state_dict(self._trainer),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer, counted = self._trainer, json.loads(state["counted"])
        self._results.metrics_of_module.load_state_dict(state["modules"])
        self._results.load_state_dict(counted["results"])
        for name, values in zip(_METRICS, counted["metrics"], strict=True):
            setattr(
                trainer._logger_connector,
                name,
                {metric: torch.tensor(value) for metric, value in values.items()},
            )
        trainer.should_stop = counted["should_stop"]
        for callback in trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
