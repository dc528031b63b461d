"""Combines the torchmetrics modules of a LightningModule across all ranks.

A metric accumulates batches, but each rank sees only its own batches. A metric is therefore reset
before each batch, and the batch's contribution is extracted afterwards. The contributions of all
ranks are then added to the metric of every rank in the same order, as in a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from shoal_common.errors import ConfigurationError
from torch import nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import (
    dim_zero_cat,
    dim_zero_max,
    dim_zero_mean,
    dim_zero_min,
    dim_zero_sum,
)

Counted = dict[str, Any]
"""A batch's contribution to a metric: the number of "updates", and the "states" by name. A state is
a tensor or a list of tensors."""


def _sum(states: Sequence[torch.Tensor]) -> torch.Tensor:
    total = states[0]
    for each in states[1:]:  # in this order, as a single process would add them
        total = total + each
    return total


_ADD: Final[dict[Any, Callable[[Sequence[torch.Tensor]], torch.Tensor]]] = {
    dim_zero_sum: _sum,
    dim_zero_max: lambda states: torch.stack(list(states)).amax(0),
    dim_zero_min: lambda states: torch.stack(list(states)).amin(0),
    dim_zero_cat: lambda states: torch.cat([torch.atleast_1d(each) for each in states]),
}
"""Function that combines the tensors of several batches, by the metric's declared reduction across
processes."""


class Metrics:
    """The metrics of a module, by name."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._aside: dict[str, Counted] = {}

    @property
    def _named(self) -> dict[str, Metric]:
        return {name: one for name, one in self._module.named_modules() if isinstance(one, Metric)}

    def updates(self) -> dict[str, int]:
        """Returns the number of updates of each metric."""
        return {name: one._update_count for name, one in self._named.items()}

    def empty(self) -> None:
        """Begins a batch: saves the accumulated states of all metrics, and resets the metrics."""
        self._aside = {name: _counted(one) for name, one in self._named.items()}
        for one in self._named.values():
            _clear(one)

    def take(self) -> dict[str, Counted]:
        """Ends a batch: returns its contribution to each metric, and restores the saved states."""
        for one in self._module.modules():
            if isinstance(one, MetricCollection):
                # of several metrics that share states, only one was updated; the others get its
                # result here
                one.values(copy_state=True)
        found = {}
        for name, one in self._named.items():
            if one._update_count > 0:
                found[name] = _counted(one)
            _put(one, self._aside.get(name) or _nothing(one))
        return found

    def add(self, batches: Sequence[Mapping[str, Counted]]) -> None:
        """Adds the contributions of batches to the metrics, in order."""
        for name, one in self._named.items():
            if received := [each[name] for each in batches if name in each]:
                own = [_counted(one)] if one._update_count > 0 else []
                _put(one, _added(name, one, own, received))

    def note_batch_value(self, name: str, batches: Sequence[Mapping[str, Counted]]) -> None:
        """Sets the value that a metric reports for the last batch, computed from `batches`, the
        contributions of all ranks."""
        one = self._named[name]
        before = _counted(one)
        _put(one, _added(name, one, [], [each[name] for each in batches if name in each]))
        one._forward_cache = one.compute() if one._update_count > 0 else None
        _put(one, before)

    def find(self, name: str) -> Metric:
        """Returns the metric with a name."""
        return self._named[name]

    def state_dict(self) -> dict[str, Counted]:
        """Returns the accumulated states of all metrics, for joiners and checkpoints."""
        return {name: _counted(one) for name, one in self._named.items() if one._update_count > 0}

    def load_state_dict(self, state: Mapping[str, Counted]) -> None:
        """Restores accumulated states from the result of `state_dict`."""
        for name, one in self._named.items():
            _put(one, state.get(name) or _nothing(one))


def _counted(one: Metric) -> Counted:
    states = {
        name: list(value) if isinstance(value := getattr(one, name), list) else value
        for name in one._defaults
    }
    return {"updates": one._update_count, "states": states}


def _nothing(one: Metric) -> Counted:
    defaults = {
        name: [] if isinstance(value, list) else value.detach().clone()
        for name, value in one._defaults.items()
    }
    return {"updates": 0, "states": defaults}


def _clear(one: Metric) -> None:
    _put(one, _nothing(one))


def _put(one: Metric, counted: Counted) -> None:
    for name, value in counted["states"].items():
        moved = (
            [each.to(one.device) for each in value]
            if isinstance(value, list)
            else value.to(one.device)
        )
        setattr(one, name, moved)
    one._update_count, one._computed = counted["updates"], None


def _added(name: str, one: Metric, own: list[Counted], received: list[Counted]) -> Counted:
    """Returns the states of a metric after adding the received contributions to its own states."""
    everything = [*own, *received]
    states: dict[str, Any] = {}
    for state, reduction in one._reductions.items():
        values = [each["states"][state] for each in everything]
        if any(isinstance(each, list) for each in values):
            states[state] = [
                part for each in values for part in (each if isinstance(each, list) else [each])
            ]
            continue
        values = [each.to(one.device) for each in values]
        if len(values) == 1 or (
            reduction is dim_zero_mean and all(torch.equal(each, values[0]) for each in values)
        ):
            states[state] = values[0]
        elif reduction in _ADD:
            states[state] = _ADD[reduction](values)
        elif reduction is dim_zero_mean or own:
            raise ConfigurationError(
                f"{name}, a torchmetrics {type(one).__name__}: its state {state!r} cannot be "
                "combined over several batches, since its dist_reduce_fx is not sum, min, "
                "max or cat; use the metric only in evaluations, use another metric, or "
                "write your own evaluation loop (docs/guides/metrics.md)"
            )
        else:
            stacked = torch.stack(values)
            states[state] = stacked if reduction is None else reduction(stacked)
    return {"updates": sum(each["updates"] for each in everything), "states": states}
