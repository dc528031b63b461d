"""An optimizer's state, seen through the pieces of parameters that it updates.

What has the shape of its piece is an element state (moments): it is cut and moved like the parameter. All else (step counts) is the same on
every rank, whatever piece that has, also an empty one; so is, for each parameter, which element states there are (`ELEMENTS`): groups with
other options have others, and momentum has nothing beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from shoal_worker.sharding.unit import Holding, Unit

ELEMENTS: Final = "elements of"
"""Key of the names of a parameter's element states, among its scalars."""


def is_of_elements(value: object, piece: torch.Tensor) -> bool:
    """Whether a value of the state belongs to the elements of a piece."""
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape == piece.shape


class ShardedOptimizerState:
    """The state of one optimizer over the pieces of several units."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer

    def element_keys(self, unit: Unit) -> dict[str, torch.dtype]:
        """Names and dtypes of the element states of a unit, the same on all ranks that have stepped."""
        found: dict[str, torch.dtype] = {}
        for piece in unit.own.pieces:
            for key, value in self._of(piece).items():
                if is_of_elements(value, piece):
                    found[key] = value.dtype
        return dict(sorted(found.items()))

    def shard(self, unit: Unit, holding: Holding, key: str, dtype: torch.dtype) -> torch.Tensor:
        """An element state of a whole shard, flat."""
        flat = torch.zeros(unit.layout.shard_numel, dtype=dtype, device=unit.home.device)
        for piece, cut in zip(holding.pieces, holding.cuts, strict=True):
            value = self._of(piece).get(key)
            if value is not None:
                flat[cut.offset : cut.offset + cut.length] = value
        return flat

    def scalars(self, unit: Unit) -> list[dict[str, Any]]:
        """What each parameter's state has beside its element states, and `ELEMENTS`; {} for one that has no state."""
        return [_scalars(state, piece) if (state := self._of(piece)) else {} for piece in unit.own.pieces]

    def replace(self, unit: Unit, scalars: list[dict[str, Any]], shards: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Gives the pieces that the unit holds now their state: `shards` by position and key."""
        if self._optimizer is None:
            return
        for holding in unit.holdings:
            for piece, cut, own in zip(holding.pieces, holding.cuts, scalars, strict=True):
                self._optimizer.state.pop(piece, None)
                if holding.position is None or not own:
                    continue
                scalars_of_it = {key: value for key, value in own.items() if key != ELEMENTS}
                state = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in scalars_of_it.items()}
                for key in own[ELEMENTS]:
                    state[key] = unit.home.copy(shards[holding.position][key][cut.offset : cut.offset + cut.length])
                self._optimizer.state[piece] = state

    def bring_home(self, unit: Unit) -> None:
        """The optimizer has made its state where it liked: moves it where it is to be kept."""
        for holding in unit.holdings:
            for piece in holding.pieces:
                for key, value in self._of(piece).items():
                    if is_of_elements(value, piece) and value.numel() and value.untyped_storage().filename is None:
                        self._of(piece)[key] = unit.home.copy(value)

    def cut(self, unit: Unit, keys: Mapping[str, torch.dtype], world_size: int, position: int, mirrored: int | None) -> None:
        """Cuts a unit that is whole here, values and state: see `Unit.cut`."""
        scalars = self.scalars(unit)
        wholes = {key: self.shard(unit, unit.own, key, dtype) for key, dtype in keys.items()}
        numel = unit.layout.numel
        unit.cut(world_size, position, mirrored)
        size = unit.layout.shard_numel
        shards: dict[int, dict[str, torch.Tensor]] = {}
        for where in {position, mirrored} - {None}:
            assert where is not None
            shards[where] = {}
            for key, whole in wholes.items():
                padded = torch.zeros(unit.layout.padded_numel, dtype=whole.dtype, device=whole.device)
                padded[:numel] = whole[:numel]
                shards[where][key] = padded[where * size : (where + 1) * size]
        self.replace(unit, scalars, shards)

    def _of(self, piece: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state.get(piece, {}) if self._optimizer is not None else {}
        return state


def _scalars(state: Mapping[str, Any], piece: torch.Tensor) -> dict[str, Any]:
    elements = sorted(key for key, value in state.items() if is_of_elements(value, piece))
    return {**{key: value for key, value in state.items() if key not in elements}, ELEMENTS: elements}
