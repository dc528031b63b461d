"""What a rank holds of the parameters of its part, and of the optimizer's state of them: all that
the replicas hold alike, or its shard.

In shards it is what zero1, zero2 and fsdp do, among the ranks that hold the same part: each updates
its shard and the one that it mirrors, and they gather the parameters: after the update, or for the
passes. (Rajbhandari et al., "ZeRO", SC 2020, section 5;
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

from shoal_worker.elastic.group_members import GroupMembers
from shoal_worker.engine.buffers import CommittedBuffers
from shoal_worker.engine.hidden_parameters import Whereabouts
from shoal_worker.engine.optimizer_state import is_element, strided_like
from shoal_worker.engine.parameter_groups import in_buckets
from shoal_worker.mesh.gradients import (
    GradientsOfPasses,
    MeshGradients,
    ReplicatedGradients,
    ScatteredGradients,
)
from shoal_worker.mesh.resharding import PieceState
from shoal_worker.sharding.collectives import Collectives
from shoal_worker.sharding.execution import ShardedExecution
from shoal_worker.sharding.layout import Division
from shoal_worker.sharding.resharding import ShardedOptimizerState
from shoal_worker.sharding.unit import Stage, Unit
from shoal_worker.sharding.whole_vectors import spread

_NO_CAP: Final = float("inf")

State = Mapping[str, Mapping[str, Any]]
"""State of an optimizer, by the parameters' names, in the shapes of `pieces`."""


class DataAxis(abc.ABC):
    """One way of holding `pieces`: the parameters of a rank's part, as the module computes with
    them."""

    execution: ShardedExecution | None = None
    """Gathers and frees the pieces block by block, where they are whole only while a block
    computes."""

    def __init__(self, pieces: Mapping[str, nn.Parameter]) -> None:
        self.pieces = pieces

    @abc.abstractmethod
    def gather(self) -> None:
        """Before passes of a pipeline: the pieces are whole until `free`. A collective of the
        replicas. A failure marks the step lost, or raises MembershipChanged if there is none."""

    @abc.abstractmethod
    def free(self) -> None:
        """What is held at rest is enough again."""

    @abc.abstractmethod
    def release(self) -> None:
        """The module is another's from here on."""

    @property
    @abc.abstractmethod
    def own(self) -> Mapping[str, torch.Tensor]:
        """What this rank updates as its own."""

    @abc.abstractmethod
    def use(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[str]], state: State
    ) -> None:
        """The optimizer updates what is here, from this state on. `groups`: names of its
        parameters, perhaps of some that are not here."""

    @abc.abstractmethod
    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Takes these values of all pieces."""

    @abc.abstractmethod
    def runs(self, optimizer: torch.optim.Optimizer | None) -> dict[int, dict[str, PieceState]]:
        """For `gather`."""

    @abc.abstractmethod
    def changed(self) -> None:
        """What this rank updates has other values now: the pieces are theirs when they are gathered
        next. Communicates nothing."""

    @abc.abstractmethod
    def fetch(self) -> None:
        """Where pieces are whole at rest they become what their owners have. A collective of the
        replicas, whose failure marks the step lost."""

    def updated(self) -> None:
        """The optimizer has stepped: the pieces become what it has made, now or when they are
        gathered. A failure marks the step lost."""
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
        """`counts(name)`: of the ranks of a replica this one counts the parameter in the norm.
        `first`: it is of the first replica. The others: see `MeshGradients`."""


class Replicated(DataAxis):
    """The data axis where each rank of it holds all values."""

    def gather(self) -> None:
        """See `DataAxis`: they are whole."""

    def free(self) -> None:
        """See `DataAxis`: they stay whole."""

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
        """See `DataAxis`: the pieces are what is updated."""

    def fetch(self) -> None:
        """See `DataAxis`: every replica has made the same."""

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
    """All of them to compute with, in units whose shards the replicas own; each rank mirrors
    another's shard."""

    def __init__(
        self,
        pieces: Mapping[str, nn.Parameter],
        leaves: Mapping[str, torch.Tensor],
        kind: Callable[[str], Hashable],
        *,
        stage: Stage,
        division: Division,
        collectives: Collectives,
        bucket_bytes: int,
        blocks: Sequence[tuple[nn.Module, Sequence[str]]] | None,
        prefetch: int,
        whereabouts: Whereabouts,
    ) -> None:
        """Takes the pieces' memory over. They are whole until `free`.

        Args:
            leaves: what the module has in the pieces' places: themselves, or DTensors around them.
            kind: pieces of one kind lie on the same ranks of a replica.
            division: of the replicas.
            bucket_bytes: what is gathered and reduced at once, where it is not by blocks.
            blocks: with `Stage.PARAMETERS`, modules that are gathered in their passes, the
                outermost first, with the names of their pieces; None: all are, by `gather`.
            prefetch: how many blocks are gathered ahead.
            whereabouts: of the model's hidden parameters.
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
        """See `DataAxis`. Of shards, not of pieces: these may be out of date after a failure."""
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
    """A value of the optimizer's state where the optimizer looks for it."""
    if not isinstance(value, torch.Tensor):
        return value
    here = value.to(piece.device) if value.dim() else value
    return strided_like(here, piece) if is_element(here, key, piece.shape) else here


def alike_pieces(
    pieces: Mapping[str, nn.Parameter], kind: Callable[[str], Hashable], cap: float
) -> Iterator[list[str]]:
    """What makes a unit: pieces of one kind, of at most `cap` bytes (one that is larger is a unit
    by itself)."""
    kinds: dict[tuple[torch.dtype, bool, Hashable], list[str]] = {}
    for name, piece in pieces.items():
        kinds.setdefault((piece.dtype, piece.requires_grad, kind(name)), []).append(name)
    for names in kinds.values():
        yield from in_buckets(names, lambda name: pieces[name].nbytes, cap)
