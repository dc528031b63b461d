"""What models have in common of which every rank holds the whole: a state dict fits into the module as it is."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import torch

from shoal_worker.elastic.group import Channel, Group
from shoal_worker.state.model import check_tensors_fit
from shoal_worker.strategies.base import ShardedModel


class WholeModel(ShardedModel):
    """A model that every rank has all of."""

    in_parts = False

    @abc.abstractmethod
    def capture(self) -> dict[str, Any]:
        """See `Replica`."""

    def assemble(self, channel: Channel) -> dict[str, Any]:
        """See `Replica`: it is whole."""
        return self.capture()

    def regroup(self, group: Group) -> None:
        """See `Replica`: every rank holds all of it."""

    def closing(self) -> dict[str, Any]:
        """See `Replica`: a rank that has the sums needs no more."""
        return {}

    def take_closing(self, told: Mapping[str, Any]) -> None:
        """See `Replica`: it has the sums."""

    def load_full(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `ShardedModel`."""
        self._check_fits(tensors)
        self.module.load_state_dict(tensors)

    def _check_fits(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises CorruptDataError unless these are the tensors of the module's state dict."""
        check_tensors_fit(tensors, self.module, {name: value.shape for name, value in self.module.state_dict().items()})
