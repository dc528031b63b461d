"""Storage of the parameters in a rank's part of the model, and of their optimizer state. Each
replica stores all of them, or they are sharded across replicas.

If they are sharded, the ranks that have the same part of the model work as under zero1, zero2 or
fsdp. Each rank updates its own shard and the shard that it mirrors, and the parameters are gathered
after the update or for the passes. (Rajbhandari et al., "ZeRO", SC 2020, section 5;
docs/explanation/mesh.md#sharding-along-the-data-axis.)
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from typing_extensions import override

from shoal_worker.elastic.state.schedulers_and_scalers import GroupMembers
from shoal_worker.engine.state.hidden_parameters import Whereabouts
from shoal_worker.engine.state.optimizer_state import is_element, strided_like
from shoal_worker.engine.state.parameter_groups import in_buckets
from shoal_worker.engine.step.buffers import CommittedBuffers
from shoal_worker.mesh.gradients import (
    GradientsOfPasses,
    MeshGradients,
    ReplicatedGradients,
    ScatteredGradients,
)
from shoal_worker.mesh.resharding import PieceState
from shoal_worker.sharding.collectives import PartCollectives
from shoal_worker.sharding.execution import ShardedExecution
from shoal_worker.sharding.layout import Division
from shoal_worker.sharding.resharding import ShardedOptimizerState
from shoal_worker.sharding.unit import Stage, Unit
from shoal_worker.sharding.unsharded_vectors import spread

_NO_CAP: Final = float("inf")

State = Mapping[str, Mapping[str, Any]]
"""Optimizer state by parameter name. Moments have the shapes of the rank's `pieces`."""


class DataAxis(abc.ABC):
    """Storage of the parameters in a rank's part of the model. `pieces`: these parameters, as the
    module uses them, by name."""

    execution: ShardedExecution | None = None
    """Gathers and frees the pieces block by block, if they are unsharded only during their block's
    passes; otherwise None."""

    def __init__(self, pieces: Mapping[str, nn.Parameter]) -> None:
        self.pieces = pieces

    @abc.abstractmethod
    def gather(self) -> None:
        """Unshards the pieces until `free` is called, for the passes of a pipeline. Must be called
        on all ranks that have the same part of the model. A failure marks the step as failed;
        outside of a step, it raises MembershipChanged."""

    @abc.abstractmethod
    def free(self) -> None:
        """Returns the pieces to the form in which they are stored between passes."""

    @abc.abstractmethod
    def release(self) -> None:
        """Detaches the pieces from the module, which will get different parameters."""

    @property
    @abc.abstractmethod
    def own(self) -> Mapping[str, torch.Tensor]:
        """Tensors that this rank updates: its pieces, or its shards of them."""

    @abc.abstractmethod
    def use(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[str]], state: State
    ) -> None:
        """Puts the tensors that this rank updates into the optimizer's groups, and sets the
        optimizer's state. `groups`: names of the parameters in each group, possibly including some
        that this rank does not have."""

    @abc.abstractmethod
    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copies the given values into the pieces."""

    @abc.abstractmethod
    def runs(self, optimizer: torch.optim.Optimizer | None) -> dict[int, dict[str, PieceState]]:
        """Returns the elements of the pieces that this rank stores, by shard and name, as
        `resharding.gather` requires them."""

    @abc.abstractmethod
    def changed(self) -> None:
        """Records that the optimizer has updated this rank's shards. The pieces receive the new
        values when they are next gathered. Does not communicate."""

    @abc.abstractmethod
    def fetch(self) -> None:
        """Copies the owners' values to pieces that are unsharded between passes. Must be called on
        all ranks that have the same part of the model. A failure marks the step as failed."""

    def updated(self) -> None:
        """Copies the updated values to the pieces after the optimizer's step. Pieces that are
        sharded between passes receive them when they are gathered next. A failure marks the step as
        failed."""
        self.changed()
        self.fetch()

    @abc.abstractmethod
    def gradients(
        self,
        *,
        counts: Callable[[str], bool],
        first: bool,
        buffers: CommittedBuffers,
        averages: bool,
        device: torch.device,
    ) -> MeshGradients:
        """Creates the object that stores the gradients. `counts(name)`: returns whether this rank
        includes its gradient of the parameter in the norm; in each replica, one rank does. `first`:
        True if this rank belongs to the first replica. For the other arguments, see
        `MeshGradients`."""


class Replicated(DataAxis):
    """Data axis without sharding: each rank stores all values of its part of the model."""

    def gather(self) -> None:
        """Does nothing: the pieces are always unsharded."""

    def free(self) -> None:
        """Does nothing: the pieces remain unsharded."""

    @override
    def release(self) -> None:
        pass

    @property
    @override
    def own(self) -> Mapping[str, torch.Tensor]:
        return self.pieces

    @override
    def use(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[str]], state: State
    ) -> None:
        for group, names in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = GroupMembers(
                self.pieces[name] for name in names if name in self.pieces
            )
        optimizer.state.clear()
        for name, own in state.items():
            optimizer.state[self.pieces[name]] = {
                key: _beside(self.pieces[name], key, value) for key, value in own.items()
            }

    @override
    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, piece in self.pieces.items():
            piece.copy_(values[name])

    @override
    def runs(self, optimizer: torch.optim.Optimizer | None) -> dict[int, dict[str, PieceState]]:
        states = optimizer.state if optimizer is not None else {}
        return {
            0: {
                name: PieceState(value=piece.detach(), state=states.get(piece, {}))
                for name, piece in self.pieces.items()
            }
        }

    def changed(self) -> None:
        """Does nothing: the optimizer updates the pieces directly."""

    def fetch(self) -> None:
        """Does nothing: every replica has computed the same update."""

    @override
    def gradients(
        self,
        *,
        counts: Callable[[str], bool],
        first: bool,
        buffers: CommittedBuffers,
        averages: bool,
        device: torch.device,
    ) -> MeshGradients:
        return ReplicatedGradients(
            self.pieces,
            counts=lambda name: first and counts(name),
            buffers=buffers,
            averages=averages,
            device=device,
        )


class InShards(DataAxis):
    """Data axis with sharding. The parameters are grouped in units. Each unit is split into shards,
    one per replica, and each rank mirrors another rank's shard."""

    def __init__(
        self,
        pieces: Mapping[str, nn.Parameter],
        leaves: Mapping[str, torch.Tensor],
        kind: Callable[[str], Hashable],
        *,
        stage: Stage,
        division: Division,
        collectives: PartCollectives,
        bucket_bytes: int,
        blocks: Sequence[tuple[nn.Module, Sequence[str]]] | None,
        prefetch: int,
        whereabouts: Whereabouts,
    ) -> None:
        """Takes over the memory of the pieces, and shards them. They stay gathered until `free` is
        called.

        Args:
            leaves: the module's parameters for these pieces: the pieces themselves, or DTensors
                around them.
            kind: function that returns the kind of a piece; pieces of the same kind are on the same
                ranks of a replica.
            division: how the units are divided among the replicas.
            bucket_bytes: number of bytes gathered or reduced in one collective, unless this is done
                by blocks.
            blocks: with `Stage.PARAMETERS`, modules that are gathered for their own passes, the
                outermost first, with the names of their pieces; None: `gather` gathers all pieces.
            prefetch: number of blocks gathered ahead.
            whereabouts: state shared by the model's hidden parameters.
        """
        super().__init__(pieces)
        self._stage, self._division, self._collectives = stage, division, collectives

        def units(names: Iterable[str], cap: float) -> list[Unit]:
            alike = alike_pieces({name: pieces[name] for name in names}, kind, cap)
            return [
                Unit(
                    own[0],
                    [pieces[n] for n in own],
                    own,
                    stage=stage,
                    wide=False,
                    leaves=[leaves[n] for n in own],
                    whereabouts=whereabouts,
                )
                for own in alike
            ]

        if blocks is None:
            self.units = units(pieces, bucket_bytes)
        else:
            made = [(module, units(names, _NO_CAP)) for module, names in blocks]
            self.execution = ShardedExecution(
                made, collectives, stage, whereabouts, prefetch=prefetch
            )
            self.units = self.execution.units
        for unit in self.units:
            unit.cut(
                division.shards,
                division.position(collectives.rank),
                division.mirrored(collectives.rank),
            )
        self._trained = [unit for unit in self.units if unit.trained]

    @override
    def gather(self) -> None:
        for unit in self.units:
            unit.start_gathering(self._collectives)
        for unit in self.units:
            unit.finish_gathering()

    @override
    def free(self) -> None:
        for unit in self.units:
            unit.free()

    @override
    def release(self) -> None:
        if self.execution is not None:
            self.execution.release()

    @property
    @override
    def own(self) -> Mapping[str, torch.Tensor]:
        return {
            name: piece
            for unit in self.units
            for name, piece in zip(unit.parameter_names, unit.own.pieces, strict=True)
        }

    @override
    def use(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[str]], state: State
    ) -> None:
        where = {
            name: (u, i)
            for u, unit in enumerate(self.units)
            for i, name in enumerate(unit.parameter_names)
        }
        for group, names in zip(optimizer.param_groups, groups, strict=True):
            here = [where[name] for name in names if name in where]
            group["params"] = GroupMembers(
                holding.pieces[i] for u, i in here for holding in self.units[u].holdings
            )
        optimizer.state.clear()
        saved = {"state": dict(enumerate(state.get(name, {}) for name in where))}
        spread([list(where.values())], saved, self.units, ShardedOptimizerState(optimizer))

    @override
    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        for unit in self.units:
            unit.load([values[name] for name in unit.parameter_names])

    def runs(self, optimizer: torch.optim.Optimizer | None) -> dict[int, dict[str, PieceState]]:
        """Implements `DataAxis.runs`. Reads the shards, because the pieces may be out of date after
        a failure."""
        states = optimizer.state if optimizer is not None else {}
        runs: dict[int, dict[str, PieceState]] = {}
        for unit in self.units:
            for holding in unit.holdings:
                own = runs.setdefault(holding.position, {}) if holding.position is not None else {}
                for name, piece in zip(unit.parameter_names, holding.pieces, strict=True):
                    own[name] = PieceState(value=piece.detach(), state=states.get(piece, {}))
        return runs

    @override
    def changed(self) -> None:
        for unit in self.units:
            unit.changed()

    @override
    def fetch(self) -> None:
        if self._stage is not Stage.PARAMETERS:
            self.gather()

    @override
    def gradients(
        self,
        *,
        counts: Callable[[str], bool],
        first: bool,
        buffers: CommittedBuffers,
        averages: bool,
        device: torch.device,
    ) -> MeshGradients:
        made = (
            ScatteredGradients
            if self.execution is None
            else functools.partial(GradientsOfPasses, execution=self.execution)
        )
        return made(
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


def _beside(piece: torch.Tensor, key: str, value: Any) -> Any:
    """Moves a value of the optimizer's state to the device where the optimizer expects it."""
    if not isinstance(value, torch.Tensor):
        return value
    here = value.to(piece.device) if value.dim() else value
    return strided_like(here, piece) if is_element(here, key, piece.shape) else here


def alike_pieces(
    pieces: Mapping[str, nn.Parameter], kind: Callable[[str], Hashable], cap: float
) -> Iterator[list[str]]:
    """Groups the pieces into units and yields the names in each unit: pieces of one kind, at most
    `cap` bytes in total. A larger piece forms a unit of its own."""
    kinds: dict[tuple[torch.dtype, bool, Hashable], list[str]] = {}
    for name, piece in pieces.items():
        kinds.setdefault((piece.dtype, piece.requires_grad, kind(name)), []).append(name)
    for names in kinds.values():
        yield from in_buckets(names, lambda name: pieces[name].nbytes, cap)
