"""Registers the counters of the Trainer's loop as state, so that joiners receive them and
checkpoints contain them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import transformers
from transformers.trainer_callback import ExportableState

_PROGRESS: Final = (
    "epoch",
    "global_step",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Fields of TrainerState that the loop updates. The other fields are determined by the arguments or
differ between ranks."""

_SPEEDS: Final = ("_runtime", "_per_second")
"""Suffixes of the names that the Trainer uses to log speeds."""


class Progress:
    """Counters of the Trainer's loop as registered state."""

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        counted = {
            "state": {name: getattr(trainer.state, name) for name in _PROGRESS}
            | {"log_history": self._history()},
            "losses": [
                float(trainer._tr_loss),
                trainer._total_loss_scalar,
                trainer._globalstep_last_logged,
            ],
            "callbacks": [
                [type(one).__name__, one.state()["attributes"]] for one in self._exportable()
            ],
        }
        return {"trainer": json.dumps(counted)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer, counted = self._trainer, json.loads(state["trainer"])
        for name, value in counted["state"].items():
            setattr(trainer.state, name, value)
        loss, trainer._total_loss_scalar, trainer._globalstep_last_logged = counted["losses"]
        trainer._tr_loss.fill_(loss)
        waiting = list(counted["callbacks"])
        for one in self._exportable():
            found = next((each for each in waiting if each[0] == type(one).__name__), None)
            if found is not None:
                waiting.remove(found)
                for name, value in found[1].items():
                    setattr(one, name, value)

    def _history(self) -> list[dict[str, Any]]:
        """Returns the Trainer's log without speeds, since speeds differ between ranks."""
        return [
            {name: value for name, value in entry.items() if not name.endswith(_SPEEDS)}
            for entry in self._trainer.state.log_history
        ]

    def _exportable(self) -> list[Any]:
        return [
            one
            for one in self._trainer.callback_handler.callbacks
            if isinstance(one, ExportableState)
        ]
