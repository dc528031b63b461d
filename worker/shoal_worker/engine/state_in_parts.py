"""One model and its optimizer as a rank holds them that need not hold all of them: what any such
state can be asked for.

How it is cut is the business of those that hold one: over the ranks of a group
(`sharding/sharded_state.py`), over the axes of a mesh (`mesh/parts.py`). The training thread owns
it.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shoal_worker.elastic.channel import Channel
from shoal_worker.engine.module_state import check_model_fits
from shoal_worker.state.fits import check_fits

Settings = list[dict[str, Any]]
"""Hyper-parameters of an optimizer's parameter groups, without their parameters."""


class StateInParts(abc.ABC):
    """The state of one model and of the optimizer over it."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    """It updates what this rank holds."""

    @property
    def settings(self) -> Settings:
        """The optimizer's, as they are now."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    @settings.setter
    def settings(self, settings: Settings) -> None:
        for group, own in zip(
            self.optimizer.param_groups if self.optimizer is not None else [], settings, strict=True
        ):
            group.update(own)

    @property
    def optimized(self) -> list[torch.Tensor]:
        """What the optimizer updates."""
        return [
            piece
            for group in (self.optimizer.param_groups if self.optimizer is not None else [])
            for piece in group["params"]
        ]

    @abc.abstractmethod
    def _shapes(self) -> Mapping[str, torch.Size | None]:
        """Shapes of the tensors of the model's state when they are whole; None for what else is in
        it."""

    @abc.abstractmethod
    def _group_shapes(self) -> Sequence[Sequence[torch.Size]]:
        """Shapes of the whole parameters in each of the optimizer's groups."""

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises CorruptDataError unless this is of the same model and optimizer, as `assemble` of
        any strategy gives it."""
        self._check_values(state["model"])
        if state["optimizer"] is not None:
            self._check_optimizer(state["optimizer"])

    def _check_values(self, tensors: Mapping[str, Any]) -> None:
        check_model_fits(tensors, self.module, self._shapes())

    def _check_optimizer(self, saved: Mapping[str, Any]) -> None:
        if self.optimizer is not None:
            check_fits(saved, self.optimizer, self._group_shapes())

    @abc.abstractmethod
    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """From here on it updates what this rank holds, in the place of the parameters that it was
        made for. Before the first cut."""

    @abc.abstractmethod
    def assemble(self, channel: Channel) -> dict[str, Any]:
        """{"model", "optimizer"} as one process would have them. Every rank of `channel` calls it.

        Raises:
            StateLostError (SHARDS_LOST): nobody holds some part any more.
            MembershipChanged: the group is over.
        """

    @abc.abstractmethod
    def values(self, channel: Channel) -> dict[str, torch.Tensor]:
        """The model's whole state dict; may share memory with the state. Every rank of `channel`
        calls it. Raises as `assemble`."""

    @abc.abstractmethod
    def load_values(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes this rank's part of a whole state dict, the same on every rank; the optimizer's
        state and the cut stay.

        Raises:
            CorruptDataError: it is of another model; nothing is changed.
        """

    @abc.abstractmethod
    def load_optimizer(self, saved: Mapping[str, Any]) -> None:
        """Takes this rank's part of a whole optimizer state dict, the same on every rank.

        Raises:
            CorruptDataError: it is of another optimizer; nothing is changed.
        """
