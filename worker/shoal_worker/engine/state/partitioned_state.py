"""Interface to the state of one model and its optimizer on a rank that may have only part of it.

Implementations shard the state across the ranks of a group (`sharding/sharded_state.py`), or along
the axes of a mesh (`mesh/parts.py`). Owned by the training thread.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shoal_worker.elastic.contract.channel import Channel
from shoal_worker.engine.state.module_state import check_model_fits
from shoal_worker.state.fits import check_fits

Settings = list[dict[str, Any]]
"""Hyperparameters of an optimizer's parameter groups, without their parameters."""


class PartitionedState(abc.ABC):
    """State of one model and its optimizer, partitioned across ranks."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    """The optimizer, which updates this rank's part."""

    @property
    def settings(self) -> Settings:
        """Current hyperparameters of the optimizer's groups."""
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
        """Tensors that the optimizer updates."""
        return [
            piece
            for group in (self.optimizer.param_groups if self.optimizer is not None else [])
            for piece in group["params"]
        ]

    @abc.abstractmethod
    def _shapes(self) -> Mapping[str, torch.Size | None]:
        """Returns the unsharded shapes of the tensors in the model's state; None for other
        entries."""

    @abc.abstractmethod
    def _group_shapes(self) -> Sequence[Sequence[torch.Size]]:
        """Returns the unsharded shapes of the parameters, for each of the optimizer's groups."""

    def check(self, state: Mapping[str, Any]) -> None:
        """Checks that `state` belongs to the same model and optimizer; otherwise raises
        CorruptDataError. `state`: result of `assemble`, possibly of another strategy."""
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
        """Sets the optimizer, and replaces the parameters in its groups with this rank's pieces of
        them. Called before the state is first sharded."""

    @abc.abstractmethod
    def assemble(self, channel: Channel) -> dict[str, Any]:
        """Returns {"model", "optimizer"}, the complete state as on a single process. Must be called
        on every rank of `channel`.

        Raises:
            StateLostError (SHARDS_LOST): part of the state is no longer on any rank.
            MembershipChanged: the group has ended.
        """

    @abc.abstractmethod
    def values(self, channel: Channel) -> dict[str, torch.Tensor]:
        """Returns the model's complete state dict, which may share memory with the state. Must be
        called on every rank of `channel`. Raises the same errors as `assemble`."""

    @abc.abstractmethod
    def load_values(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Loads this rank's part of a complete state dict, which must be the same on every rank.
        The optimizer's state and the sharding stay unchanged.

        Raises:
            CorruptDataError: the state belongs to a different model. Nothing is changed.
        """

    @abc.abstractmethod
    def load_optimizer(self, saved: Mapping[str, Any]) -> None:
        """Loads this rank's part of a complete optimizer state dict, which must be the same on
        every rank.

        Raises:
            CorruptDataError: the state belongs to a different optimizer. Nothing is changed.
        """
