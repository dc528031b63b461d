"""What models have in common of which every rank holds the whole: a state dict fits into the module as it is."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import torch
from shoal_common.errors import CorruptDataError

from shoal_worker.elastic.group import Channel, Group
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

    def load_full(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `ShardedModel`."""
        self._check_fits(tensors)
        self.module.load_state_dict(tensors)

    def _check_fits(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Checked as a whole before anything is copied: torch copies what fits and only then complains."""
        own = self.module.state_dict()
        differing = sorted(set(tensors) ^ set(own)) or [name for name in own if own[name].shape != tensors[name].shape]
        if differing:
            raise CorruptDataError(
                f"the state is of another model than this {type(self.module).__name__}: names or shapes differ, {differing[:3]} among them",
                reason="MODEL_DIFFERS",
            )
