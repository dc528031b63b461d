"""Assembles sharded vectors in operations between steps, and decides which rank writes which part
of a vector to a checkpoint. A unit's vectors are the concatenated values of its parameters and, for
each kind of moment, the concatenated moments.

The functions send messages to all members instead of using an all-gather, for two reasons. The
newest group may contain learners, and the ranks may still have the shards of the previous group,
where the shards of failed ranks exist only as mirrors.

Model and optimizer state have the same format as on a single process: the module's names, unsharded
shapes, and indices as in torch's optimizers. Every strategy can save and load this format.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from shoal_worker.elastic.contract.channel import Channel
from shoal_worker.engine.state.holders import ShardHolders, ShardsLostError, plan_copies
from shoal_worker.engine.state.optimizer_state import as_made_by
from shoal_worker.sharding.layout import UnitLayout
from shoal_worker.sharding.resharding import (
    ELEMENTS,
    MOST_COPIES,
    VALUES,
    LiveVectors,
    RankShards,
    ShardedOptimizerState,
    held_of,
    is_cut,
    newest_of,
    rows_of,
    vector_of,
)
from shoal_worker.sharding.unit import Unit
from shoal_worker.state.tree import Run

ParameterIndex = tuple[int, int]
"""A parameter: index of its unit, and index in the unit."""


def optimizer_state(
    places: Sequence[Sequence[ParameterIndex]],
    settings: Sequence[Mapping[str, Any]],
    units: Sequence[Unit],
    scalars: Sequence[Sequence[Mapping[str, Any]]],
    wholes: Sequence[Mapping[str, torch.Tensor]],
) -> dict[str, Any]:
    """Returns the optimizer state that `torch.optim.Optimizer.state_dict()` would return in a
    single process. `places`: for each parameter group, the indices of its parameters."""
    state: dict[int, dict[str, Any]] = {}
    groups, number = [], 0
    for group, own in zip(places, settings, strict=True):
        groups.append({**own, "params": list(range(number, number + len(group)))})
        for unit_index, index in group:
            unit = units[unit_index]
            kept = dict(scalars[unit_index][index])
            if kept:
                for name in kept.pop(ELEMENTS):
                    kept[name] = unit.layout.over(1).views(wholes[unit_index][name])[index]
                state[number] = kept
            number += 1
    return {"state": state, "param_groups": groups}


def spread(
    places: Sequence[Sequence[ParameterIndex]],
    saved: Mapping[str, Any],
    units: Sequence[Unit],
    state: ShardedOptimizerState,
) -> None:
    """Loads `saved`, the result of `optimizer_state`, into the optimizer, whose parameters are the
    pieces of the units."""
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
            for key, kept in own.items():
                value = as_made_by(state.optimizer, kept, key, unit.dtype)
                if is_cut(value, key, unit, shape):
                    flat = vectors.setdefault(
                        key,
                        torch.zeros(
                            unit.layout.padded_numel, dtype=value.dtype, device=unit.device
                        ),
                    )
                    unit.layout.views(flat)[index].copy_(value)
                    scalars[index][ELEMENTS].append(key)
                else:
                    scalars[index][key] = value
        size = unit.layout.shard_numel
        held = [holding.position for holding in unit.holdings if holding.position is not None]
        shards = {
            where: {key: flat[where * size : (where + 1) * size] for key, flat in vectors.items()}
            for where in held
        }
        state.replace(unit, scalars, shards)


def assemble(
    units: Sequence[Unit],
    held: Sequence[RankShards],
    keys: Sequence[Mapping[str, torch.dtype]],
    channel: Channel,
) -> Sequence[Mapping[str, torch.Tensor]]:
    """Assembles the complete vectors of each unit, and returns them by name, flat and without
    padding. They may share memory with the shards.

    `held`, `keys`: see `reshard`. If `keys` is empty for a unit, only the values of its parameters
    are assembled.

    Raises:
        ShardsLostError: no sharding is complete.
        MembershipChanged: the group has ended.
    """
    sends, mine, everywhere = agree(held, channel)
    world_size = len(sends)
    if world_size == 1 and mine is not None and everywhere:
        return [vectors[0] for vectors in mine.vectors]
    wholes: list[dict[str, torch.Tensor]] = []
    for index, unit in enumerate(units):
        whole: dict[str, torch.Tensor] = {}
        layout = unit.layout.over(world_size)
        size = layout.shard_numel
        for name, dtype in {VALUES: unit.dtype, **keys[index]}.items():
            sent = (
                [mine.vectors[index][p] for p in range(world_size) if sends[p] == channel.rank]
                if mine is not None
                else []
            )
            payload = b"".join(_bytes(vector_of(unit, vectors, name, dtype)) for vectors in sent)
            answers = channel.exchange(payload)
            flat = torch.empty(size * world_size, dtype=dtype)
            for rank, answer in enumerate(answers):
                positions = [p for p in range(world_size) if sends[p] == rank]
                if positions:
                    received = torch.frombuffer(bytearray(answer), dtype=dtype).view(
                        len(positions), size
                    )
                    flat.view(world_size, size)[positions] = received
            whole[name] = layout.in_order(flat).to(unit.device)
        wholes.append(whole)
    return wholes


def own_runs(
    units: Sequence[Unit],
    held: Sequence[RankShards],
    outlines: Sequence[Mapping[str, torch.Tensor]],
    channel: Channel,
) -> tuple[int, dict[int, list[Run]]]:
    """Returns the number of shards, and the ranges of the vectors that this rank writes, by shard.
    Each range is written by exactly one rank.

    Args:
        held: see `reshard`.
        outlines: the vectors of each unit, as tensors on the meta device.

    Raises:
        ShardsLostError: no sharding is complete.
        MembershipChanged: the group has ended.
    """
    sends, mine, _ = agree(held, channel)
    shards: dict[int, list[Run]] = {}
    for position in (p for p, rank in sends.items() if rank == channel.rank):
        assert mine is not None
        shards[position] = [
            run
            for unit, vectors, own in zip(units, mine.vectors, outlines, strict=True)
            for name, outline in own.items()
            for run in _runs(
                unit.layout.over(len(sends)), position, vectors[position], name, outline
            )
        ]
    return len(sends), shards


def _runs(
    layout: UnitLayout,
    position: int,
    vectors: Mapping[str, torch.Tensor],
    name: str,
    outline: torch.Tensor,
) -> list[Run]:
    """Returns the ranges of one vector that belong to the shard at `position`. `outline`: the
    vector on the meta device."""
    if layout.whole_tensors and name not in vectors:
        return []  # no tensor in this shard has this element state
    if isinstance(vectors, LiveVectors) and name != VALUES:
        return [
            Run(vector=outline, begin=begin, values=values)
            for begin, values in vectors.ranges(name)
        ]
    return [
        Run(
            vector=outline,
            begin=segment.start,
            values=vectors[name][segment.offset : segment.offset + segment.length],
        )
        for segment in layout.segments
        if segment.position == position
    ]


def copy_singles(
    units: Sequence[Unit],
    held: Sequence[RankShards],
    keys: Sequence[Mapping[str, torch.dtype]],
    channel: Channel,
    leaving: Collection[int],
) -> tuple[ShardHolders[int], list[dict[int, dict[str, torch.Tensor]]]] | None:
    """Finds the shards of the newest complete sharding that are on only one rank, and copies each
    of them to a second rank. Returns the ranks that have each shard, and the copies that this rank
    keeps, by unit and position. Returns None on all ranks if nothing had to be copied.

    `held`, `keys`: see `reshard`. `leaving`: ranks that are about to leave. Their shards are not
    counted, and they get no copies.

    Raises:
        MembershipChanged: the group has ended.
    """
    try:
        newest = newest_of(_rows_of_ranks(held, channel))
    except ShardsLostError:
        return None  # resharding reports this
    copies = (
        plan_copies(newest, range(channel.world_size), leaving, most=MOST_COPIES)
        if newest.shards > 1
        else []
    )
    if not copies:
        return None
    mine = held_of(held, newest.cut)
    kept: list[dict[int, dict[str, torch.Tensor]]] = []
    for index, unit in enumerate(units):
        size = unit.layout.over(newest.shards).shard_numel
        vectors = {VALUES: unit.dtype, **keys[index]}
        sent = [copy.place for copy in copies if copy.sender == channel.rank]
        own = [mine.vectors[index][p] for p in sent] if mine is not None else []
        answers = channel.exchange(
            b"".join(
                _bytes(vector_of(unit, o, name, dtype))
                for o in own
                for name, dtype in vectors.items()
            )
        )
        arrived: dict[int, dict[str, torch.Tensor]] = {}
        offsets = dict.fromkeys(range(channel.world_size), 0)
        for copy in copies:
            for name, dtype in vectors.items():
                begin, offsets[copy.sender] = (
                    offsets[copy.sender],
                    offsets[copy.sender] + size * dtype.itemsize,
                )
                if copy.mirror_holder == channel.rank:
                    data = bytearray(answers[copy.sender][begin : offsets[copy.sender]])
                    arrived.setdefault(copy.place, {})[name] = torch.frombuffer(data, dtype=dtype)
        kept.append(arrived)
    return newest, kept


def agree(
    held: Sequence[RankShards], channel: Channel
) -> tuple[dict[int, int], RankShards | None, bool]:
    """Agrees with the other ranks on the newest complete sharding. Returns the rank that sends the
    shard at each position, this rank's shards, and whether every rank has all shards."""
    newest = newest_of(_rows_of_ranks(held, channel))
    everywhere = all(
        len(newest.holders.get(position, ())) == channel.world_size
        for position in range(newest.shards)
    )
    return newest.senders(), held_of(held, newest.cut), everywhere


def _rows_of_ranks(held: Sequence[RankShards], channel: Channel) -> list[list[int]]:
    return [json.loads(reply) for reply in channel.exchange(json.dumps(rows_of(held)).encode())]


def _bytes(shard: torch.Tensor) -> bytes:
    # Copied, because a storage that is shared with NumPy cannot be resized.
    return shard.detach().to("cpu", copy=True).view(torch.uint8).numpy().tobytes()
