"""Puts a state together that is cut over ranks, one tensor at a time, on all of them.

By messages to all instead of collectives along the axes: it serves when ranks have come or gone, where the parts still lie as they were cut
for the ranks before, and in operations between steps, where the newest group may have ranks that hold nothing yet. Not for every step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from shoal_common.errors import ConfigurationError

from shoal_worker.elastic.contract import StateLostError
from shoal_worker.elastic.group import Channel
from shoal_worker.mesh.axes import Axes, Coordinate
from shoal_worker.mesh.blueprint import Blueprint
from shoal_worker.state.serial import dump_tensors, load_tensors

_CHUNK_BYTES: Final = 256 << 20
_VALUE: Final = ""
"""Key of a tensor's values, beside those of its optimizer state."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A division of the ranks, and this rank's place in it."""

    number: int
    """Of the generation that it was made in: later ones replace it."""
    axes: Axes
    at: Coordinate


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a rank holds of a state that is cut. Shares memory with it."""

    cut: Cut
    values: Mapping[str, torch.Tensor]
    state: Mapping[str, Mapping[str, Any]]
    """Of the optimizer, by the parameter's name."""

    def row(self) -> list[int]:
        """For the others."""
        axes = self.cut.axes
        return [self.cut.number, axes.pipeline, axes.tensor, axes.data, *self.cut.at]


@dataclass(frozen=True, kw_only=True)
class Whole:
    """One tensor of the state as one process would have it, on the CPU."""

    name: str
    value: torch.Tensor
    elements: Mapping[str, torch.Tensor]
    """Optimizer state of the parameter's shape."""
    rest: Mapping[str, Any]
    """Other optimizer state."""


def gather(channel: Channel, held: Sequence[Held], blueprint_for: Callable[[Axes], Blueprint], *, state: bool = True) -> Iterator[Whole]:
    """The tensors of the newest cut that is still complete, in the template's order. Every rank of `channel` exhausts it.

    `held`: the cuts of which this rank holds parts. `state`: the optimizer's too.

    Raises:
        StateLostError: SHARDS_LOST, no cut is complete any more.
        MembershipChanged: the group is over.
    """
    rows = [json.loads(told) for told in channel.exchange(json.dumps([one.row() for one in held]).encode())]
    number, axes, ranks = _newest_complete(rows)
    blueprint = blueprint_for(axes)
    mine = next((one for one in held if one.cut.number == number), None)
    tensors = blueprint.template.tensors()
    for names in _chunks(tensors):
        sends = {(name, part): _sender(blueprint, ranks, name, part) for name in names for part in range(blueprint.parts(name))}
        own = [key for key, rank in sends.items() if rank == channel.rank]
        answers = channel.exchange(_packed(mine, own, state) if mine is not None and own else b"")
        arrived: dict[str, torch.Tensor] = {}
        scalars: dict[str, dict[str, Any]] = {}
        for answer in filter(None, answers):
            loaded, metadata = load_tensors(answer)
            arrived |= loaded
            scalars |= metadata["scalars"]
        for name in names:
            yield _whole(blueprint, name, arrived, scalars.get(name, {}))


def _newest_complete(rows: Sequence[Sequence[Sequence[int]]]) -> tuple[int, Axes, dict[tuple[int, int], list[int]]]:
    """The number, the axes, and who holds each place of the pipeline and tensor axes."""
    cuts: dict[int, tuple[Axes, dict[tuple[int, int], list[int]]]] = {}
    for rank, row in enumerate(rows):
        for number, pipeline, tensor, data, *at in row:
            axes = Axes(pipeline=pipeline, tensor=tensor, data=data)
            cuts.setdefault(number, (axes, {}))[1].setdefault((at[0], at[1]), []).append(rank)
    for number in sorted(cuts, reverse=True):
        axes, ranks = cuts[number]
        if len(ranks) == axes.replica_size:
            return number, axes, ranks
    newest = max(cuts, default=None)
    left = (
        "none of the model's parts is"
        if newest is None
        else f"of the model's {cuts[newest][0].replica_size} parts {len(cuts[newest][1])} are"
    )
    raise StateLostError(
        f"{left} held by any rank, and only a checkpoint can replace the others: no replica of the model is left whole. A script that "
        "calls shoal.save_checkpoint goes back to the newest by itself within an epoch; started anew, one that calls shoal.resume goes on "
        "from it",
        reason="SHARDS_LOST",
    )


def _sender(blueprint: Blueprint, ranks: Mapping[tuple[int, int], Sequence[int]], name: str, part: int) -> int:
    """The ranks that hold it take turns, by its name."""
    candidates = sorted({rank for place in blueprint.holders(name) for rank in ranks[place, part]})
    return candidates[sum(name.encode()) % len(candidates)]


def _packed(held: Held, own: Sequence[tuple[str, int]], state: bool) -> bytes:
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for name, part in own:
        value = held.values[name]
        tensors[_key(name, part, _VALUE)] = value
        for key, one in held.state.get(name, {}).items() if state else ():
            if not isinstance(one, torch.Tensor):
                if not isinstance(one, bool | int | float | str | None):
                    raise ConfigurationError(f"the optimizer keeps a {type(one).__name__} ({key!r}) in its state, which cannot be sent")
                if part == 0:
                    scalars.setdefault(name, {})[key] = one
            elif part == 0 or is_element(one, value):
                tensors[_key(name, part, key, element=is_element(one, value))] = one
    return dump_tensors(tensors, {"scalars": scalars})


def is_element(one: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether optimizer state belongs to the elements of a parameter, or of the part of it that is here."""
    return one.dim() > 0 and one.shape == value.shape


def _key(name: str, part: int, key: str, *, element: bool = True) -> str:
    return json.dumps([name, part, key, element])


def _whole(blueprint: Blueprint, name: str, arrived: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> Whole:
    parts: dict[str, list[torch.Tensor]] = {}
    rest: dict[str, Any] = dict(scalars)
    for part in range(blueprint.parts(name)):
        for text, tensor in arrived.items():
            said = json.loads(text)
            if said[:2] == [name, part] and said[3]:
                parts.setdefault(said[2], []).append(tensor)
            elif said[:2] == [name, part]:
                rest[said[2]] = tensor
    joined = {key: blueprint.join(name, ordered) for key, ordered in parts.items()}
    value = joined.pop(_VALUE)
    return Whole(name=name, value=value, elements=joined, rest=rest)


def _chunks(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > _CHUNK_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    if names:
        yield names
