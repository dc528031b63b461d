"""Updates that can be undone. In a step with several models, each model is updated before the
outcome of the step is known."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from shoal_worker.engine.state.hidden_parameters import inside


class TentativeUpdate:
    """Copy of the parameters and the optimizer state that an update changes on this rank, made
    before the update. It takes as much memory as the originals. Settings of parameter groups are
    not included. Owned by the training thread."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Copies everything that `optimizer` is about to change. Created just before the update."""
        self._optimizer = optimizer
        with inside():
            self._updated = [piece for group in optimizer.param_groups for piece in group["params"]]
            self._values = [piece.detach().clone() for piece in self._updated]
        self._state = {piece: _copied(state) for piece, state in optimizer.state.items()}
        self.withdrawn = False

    def exchange(self) -> None:
        """Undoes the update, or reapplies it if it has been undone."""
        optimizer = self._optimizer
        with inside(), torch.no_grad():
            now = [piece.detach().clone() for piece in self._updated]
            for piece, value in zip(self._updated, self._values, strict=True):
                piece.data.copy_(value)
        state, self._values, self._state = self._state, now, dict(optimizer.state)
        optimizer.state.clear()
        optimizer.state.update(state)
        self.withdrawn = not self.withdrawn


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }
