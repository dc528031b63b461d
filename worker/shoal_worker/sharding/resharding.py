"""Cuts the parameters and their optimizer state anew for another group, out of the shards that its ranks hold.

One all-to-all per vector moves what each rank lacks (`layout.py`). Nothing is replaced before all of it is here and every rank has said so,
and the shards held before are kept until the next commit: so a failure on the way leaves either cut whole, and the next try takes the
newest that is.

Between two cuts a shard may be left with one holder, when a rank has died or leaves and its peers cannot cut anew yet. Then another rank
keeps a copy of it (`engine/holders.py`), so that the next death loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from shoal_worker.engine.holders import Claim, ShardHolders, newest_complete
from shoal_worker.engine.state_in_parts import is_element
from shoal_worker.sharding.layout import Division, message, place, runs, sizes
from shoal_worker.sharding.unit import Holding, Unit

ELEMENTS: Final = "elements of"
"""Key of the names of a parameter's element states, among its scalars."""


# ------------------------------------------------------------------------------------------------------------------ the optimizer's state
#
# An optimizer's state, seen through the pieces of parameters that it updates.
#
# What has the shape of its piece is an element state (moments): it is cut and moved like the parameter. All else (step counts) is the
# same on every rank, whatever piece that has, also an empty one; so is, for each parameter, which element states there are (`ELEMENTS`):
# groups with other options have others, and momentum has nothing beside them.


class ShardedOptimizerState:
    """The state of one optimizer over the pieces of several units."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer

    def element_keys(self, unit: Unit) -> dict[str, torch.dtype]:
        """Names and dtypes of the element states of a unit, the same on all ranks that have stepped."""
        found: dict[str, torch.dtype] = {}
        for piece in unit.own.pieces:
            for key, value in self._of(piece).items():
                if is_element(value, piece.shape):
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
                    if is_element(value, piece.shape) and value.numel() and value.untyped_storage().filename is None:
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
    elements = sorted(key for key, value in state.items() if is_element(value, piece.shape))
    return {**{key: value for key, value in state.items() if key not in elements}, ELEMENTS: elements}


# --------------------------------------------------------------------------------------------------------------------------- cutting anew

MOST_COPIES: Final = 4
"""Shards that a rank keeps copies of beside those of its cut, at most: what it tells the others of them has a fixed length."""
_MOST_ROWS: Final = 2 + MOST_COPIES // 2
"""A rank's cut, the one before, and its copies, two in each row."""


class Peers(Protocol):
    """The ranks among which shards are moved."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def all_gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Everybody's `values`, by rank."""
        ...

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]) -> None:
        """Sends the parts of a flat tensor to the ranks, and receives theirs."""
        ...


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Into how many shards this rank's parameters are cut, and which of them it holds."""

    number: int
    """Newer cuts have higher numbers: that of the generation that they were made in."""
    world_size: int
    """How many shards there are."""
    position: int
    mirrored: int | None

    def row(self) -> list[int]:
        """Returns it as integers."""
        return [self.number, self.world_size, self.position, -1 if self.mirrored is None else self.mirrored]


WHOLE: Final = Cut(number=0, world_size=1, position=0, mirrored=None)
"""What a rank holds that has not cut anything since it got the state: all of it, which is older than what any peer has cut from it."""


@dataclass(frozen=True, kw_only=True)
class RankShards:
    """The shards of one cut that this rank holds: by unit, position and vector."""

    cut: Cut
    vectors: list[dict[int, dict[str, torch.Tensor]]]
    copied: bool = False
    """They are copies of what another rank holds, on the CPU: taken where nobody holds the shards themselves any more."""


_NO_ROW: Final = [-1, 0, -1, -1, 0]


def rows_of(held: Sequence[RankShards]) -> list[int]:
    """The cuts of which this rank holds shards, as equally many integers on every rank."""
    row = [value for each in held for value in (*each.cut.row(), int(each.copied))]
    assert len(row) <= _MOST_ROWS * len(_NO_ROW)
    return (row + _NO_ROW * _MOST_ROWS)[: _MOST_ROWS * len(_NO_ROW)]


def newest_of(rows: Sequence[Sequence[int]]) -> ShardHolders[int]:
    """Who holds what of the newest cut that is complete, by what `rows_of` gave on each rank. Raises ShardsLostError: none is."""
    told = [(rank, entry) for rank, row in enumerate(rows) for entry in zip(*[iter(row)] * len(_NO_ROW), strict=True)]
    return newest_complete(
        Claim(rank=rank, cut=number, shards=world_size, places={position, mirrored} - {-1}, copied=bool(copied))
        for rank, (number, world_size, position, mirrored, copied) in told
        if number >= 0
    )


def held_of(held: Sequence[RankShards], number: int) -> RankShards | None:
    """All shards of the cut `number` that this rank has; None: it has none. Copies stand behind what it holds itself."""
    own = sorted((each for each in held if each.cut.number == number), key=lambda each: not each.copied)
    if len(own) < 2:
        return own[0] if own else None
    merged: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in own[0].vectors]
    for each in own:
        for unit, by_position in enumerate(each.vectors):
            merged[unit].update(by_position)
    return RankShards(cut=own[-1].cut, vectors=merged)


def merge_copies(
    kept: Sequence[RankShards], told: ShardHolders[int], arrived: Sequence[Mapping[int, dict[str, torch.Tensor]]]
) -> list[RankShards]:
    """The copies that a rank keeps from now on: those of this cut that it had, and those that arrived (by unit and position)."""
    vectors: list[dict[int, dict[str, torch.Tensor]]] = [dict(own) for own in arrived]
    for each in kept:
        if each.cut.number == told.cut:
            for unit, own in enumerate(each.vectors):
                vectors[unit] |= own
    positions = sorted({position for own in vectors for position in own})
    pairs = [positions[at : at + 2] for at in range(0, len(positions), 2)]
    return [
        RankShards(
            cut=Cut(number=told.cut, world_size=told.shards, position=pair[0], mirrored=pair[1] if len(pair) > 1 else None),
            vectors=[{position: own[position] for position in pair} for own in vectors],
            copied=True,
        )
        for pair in pairs
    ]


VALUES = ""
"""Name of the vector of the parameters' values, beside those of the optimizer's element states."""


def hold(units: Sequence[Unit], state: ShardedOptimizerState, cut: Cut, keys: Sequence[Mapping[str, torch.dtype]]) -> RankShards:
    """What this rank holds now. The values share memory with the units."""
    vectors = []
    for unit, own in zip(units, keys, strict=True):
        by_position = {}
        for holding in unit.holdings:
            if holding.position is not None:
                flat = {key: state.shard(unit, holding, key, dtype) for key, dtype in own.items()}
                by_position[holding.position] = {VALUES: holding.shard, **flat}
        vectors.append(by_position)
    return RankShards(cut=cut, vectors=vectors)


def reshard(
    units: Sequence[Unit],
    state: ShardedOptimizerState,
    held: Sequence[RankShards],
    scalars: Sequence[list[dict[str, Any]]],
    keys: Sequence[Mapping[str, torch.dtype]],
    peers: Peers,
    *,
    number: int,
    division: Division,
) -> tuple[Cut, RankShards | None]:
    """Cuts all units for `peers`; a collective. Returns the new cut, and what this rank held of the one it was made from; on an error
    nothing has changed.

    Args:
        held: the cuts of which this rank holds shards; none in a joiner.
        scalars, keys: of the optimizer's state by unit; the same on all ranks.
        number: of the new cut.
        division: of `peers`.

    Raises:
        ShardsLostError: no cut is complete any more.
        MembershipChanged: the group is over.
    """
    rank, world_size = peers.rank, peers.world_size
    told = newest_of(peers.all_gather_integers(rows_of(held)))
    old_world, sends = told.shards, told.senders()
    mine = held_of(held, told.cut)
    gets = [division.held(r) for r in range(world_size)]
    fresh: list[dict[int, dict[str, torch.Tensor]]] = []
    for index, unit in enumerate(units):
        old, new = unit.layout.over(old_world).shard_numel, unit.layout.over(division.shards).shard_numel
        table = runs(numel=unit.layout.numel, old_shard=old, new_shard=new, sends=sends, gets=gets)
        received, sent = sizes(table, rank)
        arrived: dict[int, dict[str, torch.Tensor]] = {position: {} for position in gets[rank]}
        for name, dtype in {VALUES: unit.dtype, **keys[index]}.items():
            here = mine.vectors[index] if mine is not None else {}
            held_here = {position: vectors[name].to(unit.home.device) for position, vectors in here.items()}  # copies lie on the CPU
            outgoing = message(table, rank, held_here or {0: torch.empty(0, dtype=dtype)}, old).to(unit.device)
            incoming = torch.empty(sum(received), dtype=dtype, device=unit.device)
            peers.all_to_all(incoming, outgoing, received, sent)
            shards = {position: torch.zeros(new, dtype=dtype, device=unit.home.device) for position in gets[rank]}
            place(table, rank, incoming, shards, new)
            for position, shard in shards.items():
                arrived[position][name] = shard
        fresh.append(arrived)
    peers.all_gather_integers([number])  # everybody has everything
    cut = division_cut(division, rank, number)
    for unit, arrived, own in zip(units, fresh, scalars, strict=True):
        unit.adopt(cut.world_size, {position: vectors[VALUES] for position, vectors in arrived.items()}, cut.position, cut.mirrored)
        element = {position: {k: v for k, v in vectors.items() if k != VALUES} for position, vectors in arrived.items()}
        state.replace(unit, own, element)
    return cut, mine


def division_cut(division: Division, rank: int, number: int) -> Cut:
    """What `rank` holds of a division."""
    return Cut(number=number, world_size=division.shards, position=division.position(rank), mirrored=division.mirrored(rank))
