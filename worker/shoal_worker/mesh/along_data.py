"""What a rank holds of the parameters of its part, and of the optimizer's state of them: all that the replicas hold alike, or its shard.

In shards it is what zero1 and zero2 do, among the ranks that hold the same part: each updates its shard and the one that it mirrors, and
they gather the parameters. (Rajbhandari et al., "ZeRO", SC 2020, section 5; decision 0142.)
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shoal_worker.mesh.gathering import Run
from shoal_worker.mesh.gradients import MeshGradients, ReplicatedGradients
from shoal_worker.mesh.scattered import ScatteredGradients
from shoal_worker.sharding.collectives import Collectives
from shoal_worker.sharding.division import Division
from shoal_worker.sharding.optimizer_state import ShardedOptimizerState
from shoal_worker.sharding.unit import Stage, Unit
from shoal_worker.sharding.whole_state import spread

State = Mapping[str, Mapping[str, Any]]
"""Of an optimizer, by the parameters' names, in the shapes of `pieces`."""


class AlongData(abc.ABC):
    """One way of holding `pieces`: the parameters of a rank's part, as the module computes with them."""

    def __init__(self, pieces: Mapping[str, nn.Parameter]) -> None:
        self.pieces = pieces

    @property
    @abc.abstractmethod
    def own(self) -> Mapping[str, torch.Tensor]:
        """What this rank updates as its own."""

    @abc.abstractmethod
    def use(self, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[str]], state: State) -> None:
        """The optimizer updates what is here, from this state on. `groups`: names of its parameters, perhaps of some that are not here."""

    @abc.abstractmethod
    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Takes these values of all pieces."""

    @abc.abstractmethod
    def runs(self, optimizer: torch.optim.Optimizer | None) -> dict[int, dict[str, Run]]:
        """For `gather`."""

    @abc.abstractmethod
    def updated(self) -> None:
        """The optimizer has stepped: the pieces become what it has made. A failure marks the step lost."""

    @abc.abstractmethod
    def gradients(self, *, counts: Callable[[str], bool], first: bool, buffers: int, averages: bool, device: torch.device) -> MeshGradients:
        """`counts(name)`: of the ranks of a replica this one counts the parameter in the norm. `first`: it is of the first replica. The
        others: see `MeshGradients`."""


class Replicated(AlongData):
    """All of them."""

    @property
    def own(self) -> Mapping[str, torch.Tensor]:
        """See `AlongData`."""
        return self.pieces

    def use(self, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[str]], state: State) -> None:
        """See `AlongData`."""
        for group, names in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [self.pieces[name] for name in names if name in self.pieces]
        optimizer.state.clear()
        for name, own in state.items():
            optimizer.state[self.pieces[name]] = {
                key: value.to(self.pieces[name].device) if isinstance(value, torch.Tensor) and value.dim() else value
                for key, value in own.items()
            }

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """See `AlongData`."""
        for name, piece in self.pieces.items():
            piece.copy_(values[name])

    def runs(self, optimizer: torch.optim.Optimizer | None) -> dict[int, dict[str, Run]]:
        """See `AlongData`."""
        states = optimizer.state if optimizer is not None else {}
        return {0: {name: Run(value=piece.detach(), state=states.get(piece, {})) for name, piece in self.pieces.items()}}

    def updated(self) -> None:
        """See `AlongData`: every replica has made the same."""

    def gradients(self, *, counts: Callable[[str], bool], first: bool, buffers: int, averages: bool, device: torch.device) -> MeshGradients:
        """See `AlongData`."""
        return ReplicatedGradients(
            self.pieces, counts=lambda name: first and counts(name), buffers=buffers, averages=averages, device=device
        )


class InShards(AlongData):
    """All of them to compute with, in units whose shards the replicas own; each rank mirrors another's shard."""

    def __init__(
        self,
        pieces: Mapping[str, nn.Parameter],
        counts: Callable[[str], bool],
        *,
        stage: Stage,
        division: Division,
        collectives: Collectives,
        bucket_bytes: int,
    ) -> None:
        """Takes the pieces' memory over. `counts`: see `gradients`. `division`: of the replicas."""
        super().__init__(pieces)
        self._stage, self._division, self._collectives = stage, division, collectives
        self.units: list[Unit] = []
        for names in _alike(pieces, counts, bucket_bytes):
            unit = Unit(names[0], [pieces[name] for name in names], names, stage=stage, wide=False)
            unit.cut(division.shards, division.position(collectives.rank), division.mirrored(collectives.rank))
            self.units.append(unit)
        self._trained = [unit for unit in self.units if unit.trained]

    @property
    def own(self) -> Mapping[str, torch.Tensor]:
        """See `AlongData`."""
        return {name: piece for unit in self.units for name, piece in zip(unit.parameter_names, unit.own.pieces, strict=True)}

    def use(self, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[str]], state: State) -> None:
        """See `AlongData`."""
        where = {name: (u, i) for u, unit in enumerate(self.units) for i, name in enumerate(unit.parameter_names)}
        for group, names in zip(optimizer.param_groups, groups, strict=True):
            here = [where[name] for name in names if name in where]
            group["params"] = [holding.pieces[i] for u, i in here for holding in self.units[u].holdings]
        optimizer.state.clear()
        saved = {"state": dict(enumerate(state.get(name, {}) for name in where))}
        spread([list(where.values())], saved, self.units, ShardedOptimizerState(optimizer))

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """See `AlongData`."""
        for unit in self.units:
            unit.load([values[name] for name in unit.parameter_names])

    def runs(self, optimizer: torch.optim.Optimizer | None) -> dict[int, dict[str, Run]]:
        """See `AlongData`. Of shards, not of pieces: these may be out of date after a failure."""
        states = optimizer.state if optimizer is not None else {}
        runs: dict[int, dict[str, Run]] = {}
        for unit in self.units:
            for holding in unit.holdings:
                own = runs.setdefault(holding.position, {}) if holding.position is not None else {}
                for name, piece in zip(unit.parameter_names, holding.pieces, strict=True):
                    own[name] = Run(value=piece.detach(), state=states.get(piece, {}))
        return runs

    def updated(self) -> None:
        """See `AlongData`."""
        for unit in self._trained:
            unit.changed()
            unit.start_gathering(self._collectives)
        for unit in self._trained:
            unit.finish_gathering()

    def gradients(self, *, counts: Callable[[str], bool], first: bool, buffers: int, averages: bool, device: torch.device) -> MeshGradients:
        """See `AlongData`."""
        return ScatteredGradients(
            self.pieces,
            self._trained,
            stage=self._stage,
            division=self._division,
            collectives=self._collectives,
            counted=[unit for unit in self._trained if counts(unit.parameter_names[0])],
            buffers=buffers,
            averages=averages,
            device=device,
        )


def _alike(pieces: Mapping[str, nn.Parameter], counts: Callable[[str], bool], cap: int) -> Iterator[list[str]]:
    """What makes a unit: pieces of one kind, of at most `cap` bytes (one that is larger is a unit by itself)."""
    kinds: dict[tuple[torch.dtype, bool, bool], list[str]] = {}
    for name, piece in pieces.items():
        names = kinds.setdefault((piece.dtype, piece.requires_grad, counts(name)), [])
        if names and sum(pieces[one].nbytes for one in names) + piece.nbytes > cap:
            yield names.copy()
            names.clear()
        names.append(name)
    yield from kinds.values()
