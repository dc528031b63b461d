"""What models have in common of which every rank holds the whole: a state dict fits into the module as it is."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from shoal_common.errors import CorruptDataError

from shoal_worker.elastic.group import Channel, Group
from shoal_worker.state.serial import dump_tensors, load_tensors
from shoal_worker.strategies.base import ShardedModel


class WholeModel(ShardedModel):
    """Saves and loads the module as bytes or as one file."""

    def serialize(self) -> bytes:
        """Parameters and buffers with the strategy's name and layout."""
        return dump_tensors(self.full_state_dict(), self.get_model_metadata())

    def deserialize(self, data: bytes) -> None:
        """Loads what `serialize` of any strategy gave.

        Raises:
            CorruptDataError: damaged, foreign or newer, or not of this model; nothing is changed.
        """
        tensors, _ = load_tensors(data)
        self._check_fits(tensors)
        self.module.load_state_dict(tensors)

    def assemble(self, channel: Channel) -> dict[str, Any]:
        """See `Replica`: it is whole."""
        return self.capture()

    @abc.abstractmethod
    def capture(self) -> dict[str, Any]:
        """See `Replica`."""

    def regroup(self, group: Group) -> None:
        """See `Replica`: every rank holds all of it."""

    def _check_fits(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Checked as a whole before anything is copied: torch copies what fits and only then complains."""
        own = self.module.state_dict()
        differing = sorted(set(tensors) ^ set(own)) or [name for name in own if own[name].shape != tensors[name].shape]
        if differing:
            raise CorruptDataError(
                f"the state is of another model than this {type(self.module).__name__}: names or shapes differ, {differing[:3]} among them",
                reason="MODEL_DIFFERS",
            )

    def save_model(self, path: str | Path) -> None:
        """Writes `serialize()` to a file, atomically; on the first rank that holds the state."""
        if self._session.is_first:
            target = Path(path)
            temporary = target.with_name(f".{target.name}.tmp")
            temporary.write_bytes(self.serialize())
            temporary.replace(target)

    def load_model(self, path: str | Path) -> None:
        """Reads a file of `save_model`. Raises what `deserialize` raises."""
        self.deserialize(Path(path).read_bytes())
