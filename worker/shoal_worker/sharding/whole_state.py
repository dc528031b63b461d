"""Model and optimizer state in the form that one process would have: under the module's names, with whole shapes, indexed as torch's
optimizers do. What every strategy saves, and can load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal_worker.sharding.optimizer_state import ELEMENTS, ShardedOptimizerState
from shoal_worker.sharding.unit import Unit

Place = tuple[int, int]
"""A parameter: index of its unit, and in the unit."""


def optimizer_state(
    places: Sequence[Sequence[Place]],
    settings: Sequence[Mapping[str, Any]],
    units: Sequence[Unit],
    scalars: Sequence[Sequence[Mapping[str, Any]]],
    wholes: Sequence[Mapping[str, torch.Tensor]],
) -> dict[str, Any]:
    """Returns what `torch.optim.Optimizer.state_dict()` of one process would. `places`: the parameters of each group."""
    state: dict[int, dict[str, Any]] = {}
    groups, number = [], 0
    for group, own in zip(places, settings, strict=True):
        groups.append({**own, "params": list(range(number, number + len(group)))})
        for unit_index, index in group:
            unit = units[unit_index]
            kept = dict(scalars[unit_index][index])
            if kept:
                for name in kept.pop(ELEMENTS):
                    kept[name] = unit.layout.views(wholes[unit_index][name])[index]
                state[number] = kept
            number += 1
    return {"state": state, "param_groups": groups}


def spread(places: Sequence[Sequence[Place]], saved: Mapping[str, Any], units: Sequence[Unit], state: ShardedOptimizerState) -> None:
    """Gives the pieces that the units hold their part of the optimizer state of `optimizer_state`."""
    by_unit: list[list[dict[str, Any]]] = [[{} for _ in unit.parameters] for unit in units]
    number = 0
    for group in places:
        for unit_index, index in group:
            by_unit[unit_index][index] = dict(saved["state"].get(number, {}))
            number += 1
    for unit, states in zip(units, by_unit, strict=True):
        vectors: dict[str, torch.Tensor] = {}
        scalars: list[dict[str, Any]] = []
        for index, (shape, own) in enumerate(zip(unit.layout.shapes, states, strict=True)):
            scalars.append({ELEMENTS: []} if own else {})
            for key, value in own.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shape:
                    flat = vectors.setdefault(key, torch.zeros(unit.layout.padded_numel, dtype=value.dtype, device=unit.device))
                    unit.layout.views(flat)[index].copy_(value)
                    scalars[index][ELEMENTS].append(key)
                else:
                    scalars[index][key] = value
        size = unit.layout.shard_numel
        held = [holding.position for holding in unit.holdings if holding.position is not None]
        shards = {where: {key: flat[where * size : (where + 1) * size] for key, flat in vectors.items()} for where in held}
        state.replace(unit, scalars, shards)
