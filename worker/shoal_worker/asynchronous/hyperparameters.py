"""The user's torch optimizer, as the parameter servers are to run it, and what schedulers change in it.

Whose schedule counts, when each worker steps a scheduler of its own at its own speed? The one that is furthest: a change carries a
revision, the number of changes that this worker's hyperparameters have gone through, and a server ignores a revision that is not above its
last. Equal schedules have equal values at equal revisions, whether they are stepped per iteration or per epoch (docs/decisions/0081).

All of it runs on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from shoal_common.errors import ConfigurationError
from shoal_protos.v1 import parameter_server_pb2 as pb

Values = tuple[tuple[str, float], ...]
"""One group's hyperparameters by the servers' names, sorted."""


def _sgd(group: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(group[name]) for name in ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")}


def _adamw(group: Mapping[str, Any]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    plain = {name: float(group[name]) for name in ("lr", "eps", "weight_decay", "amsgrad", "maximize")}
    return plain | {"beta1": float(beta1), "beta2": float(beta2)}


_READERS: dict[type[torch.optim.Optimizer], tuple[str, Callable[[Mapping[str, Any]], dict[str, float]]]] = {
    torch.optim.SGD: ("sgd", _sgd),
    torch.optim.AdamW: ("adamw", _adamw),
}
_STRUCTURAL = frozenset({"amsgrad"})
"""Decides which state a server keeps, so it cannot change."""


@dataclass(frozen=True, kw_only=True)
class Revision:
    """The hyperparameters at one moment of the schedule."""

    number: int
    """0: as configured. Grows by one with every change."""
    groups: tuple[Values, ...]


class ServerOptimizer:
    """The optimizer that the servers run."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        """`names`: id(parameter) -> its name among the declared tensors.

        Raises:
            ConfigurationError: an optimizer that the servers do not have.
        """
        # Exactly these classes: a subclass may override the update, which would be lost without a word.
        known = _READERS.get(type(optimizer))
        if known is None:
            raise ConfigurationError(
                f"optimizer={type(optimizer).__module__}.{type(optimizer).__qualname__}: with async_sgd the parameter servers run the "
                "optimizer, and they have torch.optim.SGD and torch.optim.AdamW; use one of these (Adam without weight decay is "
                "AdamW(weight_decay=0))"
            )
        self.name, self._read_group = known
        self._optimizer = optimizer
        self._tensors = tuple(tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups)
        self._configured = self._read()
        self._latest = Revision(number=0, groups=self._configured)

    @property
    def spec(self) -> pb.OptimizerSpec:
        """For ConfigureOptimizer: as it was when it was handed to `as_distributed`, which is the same in every worker, joiners too."""
        return pb.OptimizerSpec(name=self.name, hyperparameters=dict(self._configured[0]), groups=self._messages(self._configured))

    def look(self) -> Revision:
        """The newest revision; a new one if a scheduler, or the user, has changed something since the last look.

        Schedulers read `optimizer.param_groups` at each step of theirs, and every read looks. So two scheduler steps in a row are two
        revisions.
        """
        now = self._read()
        if now != self._latest.groups:
            self._check_structure(now)
            self._latest = Revision(number=self._latest.number + 1, groups=now)
        return self._latest

    def adopt(self, number: int) -> None:
        """The optimizer was given a peer's settings, which are its revision `number`: this worker's schedule goes on from there."""
        self._latest = Revision(number=number, groups=self._read())

    def change(self, revision: Revision) -> tuple[dict[str, float], list[pb.ParameterGroup]]:
        """`revision` as SetHyperparameters takes it: for all tensors, and for groups of their own."""
        return self._variable(revision.groups[0]), self._messages(
            tuple(tuple(self._variable(values).items()) for values in revision.groups)
        )

    def _read(self) -> tuple[Values, ...]:
        return tuple(tuple(sorted(self._read_group(group).items())) for group in self._optimizer.param_groups)

    def _messages(self, groups: tuple[Values, ...]) -> list[pb.ParameterGroup]:
        """Nothing for a single group: its hyperparameters are the optimizer's own."""
        if len(groups) == 1:
            return []
        pairs = zip(self._tensors, groups, strict=True)
        return [pb.ParameterGroup(tensors=tensors, hyperparameters=dict(values)) for tensors, values in pairs if tensors]

    def _variable(self, values: Values) -> dict[str, float]:
        return {name: value for name, value in values if name not in _STRUCTURAL}

    def _check_structure(self, now: tuple[Values, ...]) -> None:
        for before, after in zip(self._configured, now, strict=True):
            for name in _STRUCTURAL & dict(before).keys():
                if dict(before)[name] != dict(after)[name]:
                    raise ConfigurationError(
                        f"{name} was changed to {bool(dict(after)[name])} while the optimizer runs; it decides which state the servers "
                        "keep: set it before as_distributed"
                    )
