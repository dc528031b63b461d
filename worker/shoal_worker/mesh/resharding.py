"""Assembles a state that is split across ranks, one tensor at a time, on all ranks.

The functions send messages to all ranks instead of using collectives along the axes, which are not
possible here. After ranks have joined or left, the state is still split for the previous ranks. In
operations between steps, the newest group may include ranks that have no part of the state. Such
messages would be too slow for every step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from shoal_common.errors import ConfigurationError

from shoal_worker.elastic.contract.channel import Channel
from shoal_worker.engine.state.holders import (
    Claim,
    SendingTurns,
    ShardHolders,
    ShardsLostError,
    newest_complete,
    plan_copies,
)
from shoal_worker.engine.state.optimizer_state import is_element
from shoal_worker.engine.state.parameter_groups import in_buckets
from shoal_worker.mesh.layouts import Axes, Blueprint, Coordinate
from shoal_worker.state.serial import dump_tensors, load_tensors

_CHUNK_BYTES: Final = 32 << 20
"""Number of bytes of values in one message. The message also contains the optimizer state of these
values, and a few copies of it exist temporarily."""
_VALUE: Final = ""
"""Key of a tensor's values. Other keys belong to its optimizer state."""

MeshPlace = tuple[int, int, int]
"""Position on the pipeline axis, position on the tensor axis, and number of the shard along the
data axis."""


@dataclass(frozen=True, kw_only=True)
class MeshCut:
    """Description of a mesh and of this rank's position in it."""

    number: int
    """Number of the generation that formed the mesh. Newer meshes replace older ones."""
    axes: Axes
    at: Coordinate
    shards: int = 1
    """Number of shards along the data axis for each rank's part: 1, or the size of the data
    axis."""
    mirrored: int | None = None
    """Number of the shard that this rank mirrors in addition to its own shard; None if it mirrors
    none."""

    @property
    def positions(self) -> list[int]:
        """Indices of this rank's shards along the data axis, its own shard first."""
        return [self.at.data % self.shards, *([self.mirrored] if self.mirrored is not None else [])]

    def row(self) -> list[int]:
        """Encodes the mesh and the position as integers, for sending to other ranks."""
        axes = self.axes
        return [
            self.number,
            axes.pipeline,
            axes.tensor,
            axes.data,
            self.shards,
            self.at.pipeline,
            self.at.tensor,
            *self.positions,
        ]

    @classmethod
    def of_row(cls, row: Sequence[int]) -> MeshCut:
        """Decodes the result of `row`."""
        number, pipeline, tensor, data, shards, at_pipeline, at_tensor, position, *mirrored = row
        axes, at = (
            Axes(pipeline=pipeline, tensor=tensor, data=data),
            Coordinate(at_pipeline, at_tensor, position),
        )
        return cls(
            number=number,
            axes=axes,
            at=at,
            shards=shards,
            mirrored=mirrored[0] if mirrored else None,
        )


@dataclass(frozen=True, kw_only=True)
class PieceState:
    """Elements of a tensor (or of this rank's part of it) that belong to one shard, and their
    optimizer state. If there are several shards, the tensor is flattened, and each shard continues
    where the previous one ends."""

    value: torch.Tensor
    state: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """The parts of a state, split for one mesh, that a rank has. They share memory with the
    state."""

    cut: MeshCut
    runs: Mapping[int, Mapping[str, PieceState]]
    """Shard -> tensor name -> the tensor's elements in that shard. Tensors that are not parameters
    are not split along the data axis and belong to shard 0."""
    copied: bool = False
    """True if this is a copy of another rank's data, to be used only if no rank has the original
    any more."""


@dataclass(frozen=True, kw_only=True)
class WholeTensor:
    """One unsplit tensor of the state, on the CPU."""

    name: str
    value: torch.Tensor
    elements: Mapping[str, torch.Tensor]
    """Optimizer state with the parameter's shape."""
    rest: Mapping[str, Any]
    """All other optimizer state."""


def gather(
    channel: Channel,
    held: Sequence[RankParts],
    blueprint_for: Callable[[Axes], Blueprint],
    *,
    state: bool = True,
) -> Iterator[WholeTensor]:
    """Yields the unsplit tensors of the state one by one, assembled from the parts of the newest
    complete mesh, in the order of the template. Every rank of `channel` must exhaust the iterator.

    `held`: this rank's parts for the current and previous meshes. `state`: True to include the
    optimizer's state.

    Raises:
        ShardsLostError: no mesh is complete, because the ranks that had some part are gone.
        MembershipChanged: the group has ended.
    """
    newest, cut = _newest(channel, held)
    blueprint = blueprint_for(cut.axes)
    senders = _Senders(blueprint, newest.sources())
    mine = sorted((one for one in held if one.cut.number == newest.cut), key=lambda one: one.copied)
    tensors = blueprint.template.tensors()
    for names in in_buckets(tensors, lambda name: tensors[name].nbytes, _CHUNK_BYTES):
        sends = {
            (name, *place): rank
            for name in names
            for place, rank in senders.of(name, tensors[name].numel()).items()
        }
        own = [key for key, rank in sends.items() if rank == channel.rank]
        answers = channel.exchange(_packed(mine, own, state) if mine and own else b"")
        arrived: dict[str, list[_Arrived]] = {name: [] for name in names}
        scalars: dict[str, dict[str, Any]] = {}
        for answer in filter(None, answers):
            loaded, metadata = load_tensors(answer)
            for key, tensor in loaded.items():
                name, part, shard, of, element = json.loads(key)
                arrived[name].append(_Arrived(part, shard, of, element, tensor))
            scalars |= metadata["scalars"]
        del answers
        for name in names:
            yield _whole(blueprint, name, arrived[name], scalars.get(name, {}))


def copy_singles(
    channel: Channel,
    held: Sequence[RankParts],
    blueprint_for: Callable[[Axes], Blueprint],
    leaving: Collection[int],
) -> list[RankParts] | None:
    """Finds the parts of the newest complete mesh that only one rank has, and copies each of them
    to a second rank. Returns the copies that this rank keeps, or None on all ranks if nothing has
    to be copied. If the mesh has a single replica, nothing is copied, because every part exists
    only once.

    `held`: this rank's parts for the current and previous meshes. `leaving`: ranks that are about
    to leave. Their parts are not counted, and they get no copies.

    Raises:
        MembershipChanged: the group has ended."""
    try:
        newest, cut = _newest(channel, held)
    except ShardsLostError:
        return None  # this is reported when the state is resharded
    copies = plan_copies(newest, range(channel.world_size), leaving) if cut.axes.data > 1 else []
    if not copies:
        return None
    mine = sorted((one for one in held if one.cut.number == newest.cut), key=lambda one: one.copied)
    arrived: dict[MeshPlace, dict[str, PieceState]] = {
        copy.place: {} for copy in copies if copy.mirror_holder == channel.rank
    }
    tensors = blueprint_for(cut.axes).template.tensors()
    for names in in_buckets(tensors, lambda name: tensors[name].nbytes, _CHUNK_BYTES):
        sent = [copy.place for copy in copies if copy.sender == channel.rank]
        for answer in filter(
            None, channel.exchange(_packed_places(mine, sent, names) if sent else b"")
        ):
            _take_copies(answer, arrived)
    return [
        RankParts(
            cut=MeshCut(
                number=cut.number,
                axes=cut.axes,
                at=Coordinate(stage, part, shard),
                shards=cut.shards,
            ),
            runs={shard: runs},
            copied=True,
        )
        for (stage, part, shard), runs in arrived.items()
    ]


def _packed_places(
    held: Sequence[RankParts], places: Sequence[MeshPlace], names: Sequence[str]
) -> bytes:
    tensors: dict[str, torch.Tensor] = {}
    scalars: list[list[Any]] = []
    for place in places:
        for name in names:
            run = _run_at(held, place[0], place[1], place[2], name)
            if run is None:
                continue
            tensors[json.dumps([place, name, _VALUE])] = run.value
            for key, one in run.state.items():
                if isinstance(one, torch.Tensor):
                    tensors[json.dumps([place, name, key])] = one
                else:
                    scalars.append([place, name, key, checked(key, one)])
    return dump_tensors(tensors, {"scalars": scalars})


def _take_copies(answer: bytes, arrived: Mapping[MeshPlace, dict[str, PieceState]]) -> None:
    loaded, metadata = load_tensors(answer)
    values: dict[tuple[MeshPlace, str], torch.Tensor] = {}
    states: dict[tuple[MeshPlace, str], dict[str, Any]] = {}
    for label, tensor in loaded.items():
        place, name, key = json.loads(label)
        if key == _VALUE:
            values[tuple(place), name] = tensor
        else:
            states.setdefault((tuple(place), name), {})[key] = tensor
    for place, name, key, one in metadata["scalars"]:
        states.setdefault((tuple(place), name), {})[key] = one
    for (place, name), value in values.items():
        if place in arrived:
            arrived[place][name] = PieceState(value=value, state=states.get((place, name), {}))


def _newest(channel: Channel, held: Sequence[RankParts]) -> tuple[ShardHolders[MeshPlace], MeshCut]:
    """Finds the newest complete mesh. Returns, for each of its parts, the ranks that have the part,
    and the `MeshCut` of one of these ranks."""
    rows = [[int(one.copied), *one.cut.row()] for one in held]
    claims: list[Claim[MeshPlace]] = []
    cuts: dict[int, MeshCut] = {}
    for rank, reply in enumerate(channel.exchange(json.dumps(rows).encode())):
        for copied, *row in json.loads(reply):
            cut = MeshCut.of_row(row)
            cuts.setdefault(cut.number, cut)
            places = [(cut.at.pipeline, cut.at.tensor, position) for position in cut.positions]
            shards = cut.axes.replica_size * cut.shards
            claims.append(
                Claim(rank=rank, cut=cut.number, shards=shards, places=places, copied=bool(copied))
            )
    newest = newest_complete(claims)
    return newest, cuts[newest.cut]


@dataclass(frozen=True)
class _Arrived:
    part: int
    shard: int
    key: str
    element: bool
    tensor: torch.Tensor


@dataclass(frozen=True)
class _Senders:
    """Chooses the rank that sends each part of a tensor."""

    blueprint: Blueprint
    ranks: Mapping[MeshPlace, Sequence[int]]
    """Ranks that have the data at each position."""
    stages: SendingTurns = field(default_factory=SendingTurns)
    turns: SendingTurns = field(default_factory=SendingTurns)

    def of(self, name: str, elements: int) -> dict[tuple[int, int], int]:
        """Returns the rank that sends each (part, shard) of one tensor. `elements`: number of
        elements of the tensor. All shards of one part come from the same stage, because each stage
        splits shared tensors in its own way."""
        stage = self.stages.choose(self.blueprint.holders(name), elements)
        parts = self.blueprint.parts(name)
        own = {
            (part, shard): at
            for (pipeline, part, shard), at in sorted(self.ranks.items())
            if pipeline == stage and part < parts
        }
        return {place: self.turns.choose(candidates, elements) for place, candidates in own.items()}


def _run_at(
    held: Sequence[RankParts], stage: int | None, part: int, shard: int, name: str
) -> PieceState | None:
    """Returns this rank's elements of the tensor `name` at a position of the mesh; None if it has
    none. `stage`: position on the pipeline axis; None: any, because all stages have the same copy
    of a shared tensor."""
    at_hand = (
        one for one in held if one.cut.at.tensor == part and stage in (None, one.cut.at.pipeline)
    )
    return next((one.runs[shard][name] for one in at_hand if name in one.runs.get(shard, {})), None)


def checked(key: str, one: Any) -> Any:
    """Returns `one`, a value of the optimizer's state that is not a tensor. Raises
    ConfigurationError (STATE_UNSUPPORTED) if it cannot be sent."""
    if not isinstance(one, bool | int | float | str | None):
        raise ConfigurationError(
            f"the optimizer keeps an object of type {type(one).__name__} ({key!r}) in its state, "
            "which cannot be sent; expected a tensor, a number or a string",
            reason="STATE_UNSUPPORTED",
        )
    return one


def _packed(held: Sequence[RankParts], own: Sequence[tuple[str, int, int]], state: bool) -> bytes:
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for name, part, shard in own:
        run = _run_at(held, None, part, shard, name)
        if run is None:
            continue
        tensors[_key(name, part, shard, _VALUE)] = run.value
        first = part == 0 and shard == 0
        for key, one in run.state.items() if state else ():
            if not isinstance(one, torch.Tensor):
                checked(key, one)
                if first:
                    scalars.setdefault(name, {})[key] = one
            elif (element := is_element(one, key, run.value.shape)) or first:
                tensors[_key(name, part, shard, key, element=element)] = one
    return dump_tensors(tensors, {"scalars": scalars})


def _key(name: str, part: int, shard: int, key: str, *, element: bool = True) -> str:
    return json.dumps([name, part, shard, key, element])


def _whole(
    blueprint: Blueprint, name: str, arrived: Sequence[_Arrived], scalars: Mapping[str, Any]
) -> WholeTensor:
    rest = {one.key: one.tensor for one in arrived if not one.element}
    joined: dict[str, torch.Tensor] = {}
    for key in dict.fromkeys(one.key for one in arrived if one.element):
        runs = sorted(
            (one for one in arrived if one.element and one.key == key), key=lambda one: one.shard
        )
        parts = [
            [run.tensor for run in runs if run.part == part]
            for part in range(blueprint.parts(name))
        ]
        joined[key] = blueprint.join(
            name, [_join_runs(blueprint.shape(name, part), own) for part, own in enumerate(parts)]
        )
    value = joined.pop(_VALUE)
    return WholeTensor(name=name, value=value, elements=joined, rest={**scalars, **rest})


def _join_runs(shape: torch.Size, runs: Sequence[torch.Tensor]) -> torch.Tensor:
    return (runs[0] if len(runs) == 1 else torch.cat(list(runs))).view(shape)
