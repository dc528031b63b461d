"""Redistributes sharded parameters and optimizer state when the ranks change.

One all-to-all per vector sends each rank the elements that it needs (`layout.py`). No rank replaces
its shards before all ranks have confirmed that they have received everything, and the previous
shards are kept until the next commit. After a failure, the old or the new sharding is therefore
complete, and the next attempt starts from the newest complete one.

If a rank dies or leaves and its peers cannot reshard yet, some shards may remain on a single rank.
A second rank then keeps a copy of each (`engine/state/holders.py`), so that the state survives if
one more rank dies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeGuard

import torch
from shoal_common.errors import ConfigurationError
from typing_extensions import override

from shoal_worker.engine.state.holders import Claim, ShardHolders, newest_complete
from shoal_worker.engine.state.optimizer_state import is_element
from shoal_worker.sharding.layout import Division, message, place, runs, sizes
from shoal_worker.sharding.unit import Holding, Unit
from shoal_worker.state.serial import dump_tensors, load_tensors
from shoal_worker.state.tree import flatten, unflatten
from shoal_worker.torch_internals import pytree

ELEMENTS: Final = "elements of"
"""Key, among a parameter's scalars, for the names of the parameter's element states."""


# ---------------------------------------------------------------------------- the optimizer's state
#
# The state of an optimizer, for each piece of a parameter that it updates.
#
# State with the shape of a piece (moments) is called an element state: it is sharded and moved like
# the parameter. All other state (step counts) is called scalars, and is the same on every rank,
# even on a rank whose piece is empty. Every rank also stores the names of each parameter's element
# states (`ELEMENTS`), because they depend on the parameter group's options, and some optimizers,
# such as SGD with momentum, have no scalars that would show them.
#
# If tensors are not split, all this applies only to a parameter's owners, and scalars may be
# anything (sums of rows and columns, preconditioners). All ranks receive them when the optimizer
# state is resharded or assembled (`gather_from_owners`).


class ShardedOptimizerState:
    """Optimizer state of one model, accessed by unit and by piece. A value that has one element per
    element of the parameter is an element state (a moment, for example); other values are
    scalars."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer

    def element_keys(self, unit: Unit) -> dict[str, torch.dtype]:
        """Returns the names and dtypes of a unit's element states. If tensors are split, the result
        is the same on all ranks whose optimizer has stepped."""
        found: dict[str, torch.dtype] = {}
        for piece in (piece for holding in unit.holdings for piece in holding.pieces):
            for key, value in self._of(piece).items():
                if is_cut(value, key, unit, piece.shape):
                    found[key] = value.dtype
        return dict(sorted(found.items()))

    def check_dtypes(self, unit: Unit) -> None:
        """Checks that each element state has the same dtype for all parameters of a unit, because
        it is sharded as one vector. Otherwise raises ConfigurationError (STATE_UNSUPPORTED)."""
        found: dict[str, tuple[torch.dtype, str]] = {}
        for name, piece in zip(unit.parameter_names, unit.own.pieces, strict=True):
            for key, value in self._of(piece).items():
                if not is_cut(value, key, unit, piece.shape):
                    continue
                dtype, other = found.setdefault(key, (value.dtype, name))
                if dtype != value.dtype:
                    raise ConfigurationError(
                        f"{type(self.optimizer).__name__} keeps {key!r} as {dtype} for parameter "
                        f"{other!r}, but as {value.dtype} for {name!r}: parameters that are "
                        "sharded together need one dtype; change the optimizer, or use "
                        'strategy="ddp"',
                        reason="STATE_UNSUPPORTED",
                    )

    def shard(self, unit: Unit, holding: Holding, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns the element state `key` of an entire shard as one flat tensor."""
        flat = torch.zeros(unit.layout.shard_numel, dtype=dtype, device=unit.placement.device)
        for piece, cut in zip(holding.pieces, holding.cuts, strict=True):
            value = self._of(piece).get(key)
            if is_cut(value, key, unit, piece.shape):
                flat[cut.offset : cut.offset + cut.length] = value.reshape(-1)
        return flat

    def ranges(
        self, unit: Unit, holding: Holding, key: str, dtype: torch.dtype
    ) -> list[tuple[int, torch.Tensor]]:
        """Returns the element state `key` of an entire shard as a list of ranges, without
        assembling it. A range belongs to one piece. It consists of the index of its first element
        in the concatenated parameters, and its elements as a flat tensor."""
        begins = [0, *itertools.accumulate(unit.layout.numels)]
        ranges = []
        for piece, cut in zip(holding.pieces, holding.cuts, strict=True):
            if not cut.length:
                continue
            value = self._of(piece).get(key)
            if not is_cut(value, key, unit, piece.shape):
                value = torch.zeros(cut.length, dtype=dtype, device=unit.placement.device)
            ranges.append((begins[cut.parameter] + cut.start, value.reshape(-1).to(dtype)))
        return ranges

    def scalars(self, unit: Unit) -> list[dict[str, Any]]:
        """Returns, for each parameter, its scalars, and the names of its element states under the
        key `ELEMENTS`. The result is {} for a parameter without state on this rank."""
        return self.scalars_of(unit, unit.own)

    def scalars_of(self, unit: Unit, holding: Holding) -> list[dict[str, Any]]:
        """Returns the same as `scalars`, for the shard in `holding`."""
        return [
            _scalars(unit, state, piece) if (state := self._of(piece)) else {}
            for piece in holding.pieces
        ]

    def replace(
        self,
        unit: Unit,
        scalars: list[dict[str, Any]],
        shards: Mapping[int, Mapping[str, torch.Tensor]],
    ) -> None:
        """Replaces the optimizer state of the unit's current pieces. `shards`: element states, by
        position and key."""
        if self.optimizer is None:
            return
        for holding in unit.holdings:
            for piece, cut, own in zip(holding.pieces, holding.cuts, scalars, strict=True):
                self.optimizer.state.pop(piece, None)
                if (
                    holding.position is None
                    or not own
                    or (unit.layout.whole_tensors and not cut.length)
                ):
                    continue
                state = {
                    key: _own_copy(value, unit.placement.device)
                    for key, value in own.items()
                    if key != ELEMENTS
                }
                for key in own[ELEMENTS]:
                    flat = shards[holding.position][key][cut.offset : cut.offset + cut.length]
                    state[key] = unit.placement.copy(flat).view(piece.shape)
                self.optimizer.state[piece] = state

    def move_to_placement(self, unit: Unit) -> None:
        """Moves optimizer state to the memory of the unit's shards, if the optimizer has created it
        elsewhere."""
        for holding in unit.holdings:
            for piece in holding.pieces:
                for key, value in self._of(piece).items():
                    if (
                        is_element(value, key, piece.shape)
                        and value.numel()
                        and value.untyped_storage().filename is None
                    ):
                        self._of(piece)[key] = unit.placement.copy(value.reshape(-1)).view(
                            value.shape
                        )

    def cut(
        self,
        unit: Unit,
        keys: Mapping[str, torch.dtype],
        world_size: int,
        position: int,
        mirrored: int | None,
    ) -> None:
        """Shards a unit that is unsharded on this rank (`Unit.cut`), and its optimizer state."""
        scalars = self.scalars(unit)
        wholes = {key: self.shard(unit, unit.own, key, dtype) for key, dtype in keys.items()}
        unit.cut(world_size, position, mirrored)
        held = {position, mirrored} - {None}
        shards = {
            where: {key: unit.layout.shard_of(whole, where) for key, whole in wholes.items()}
            for where in held
            if where is not None
        }
        self.replace(unit, scalars, shards)

    def _of(self, piece: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = (
            self.optimizer.state.get(piece, {}) if self.optimizer is not None else {}
        )
        return state


def is_cut(value: object, key: str, unit: Unit, shape: torch.Size) -> TypeGuard[torch.Tensor]:
    """Returns whether a value of the optimizer state is an element state, which is sharded and
    moved together with its parameter. `shape`: shape of the parameter or of its local part. If
    tensors are not split, the value must have the parameter's dtype, so that all owners in a unit
    agree on the dtype without communication."""
    return is_element(value, key, shape) and (
        not unit.layout.whole_tensors or value.dtype == unit.dtype
    )


def _scalars(unit: Unit, state: Mapping[str, Any], piece: torch.Tensor) -> dict[str, Any]:
    elements = sorted(key for key, value in state.items() if is_cut(value, key, unit, piece.shape))
    return {
        **{key: value for key, value in state.items() if key not in elements},
        ELEMENTS: elements,
    }


def _own_copy(value: Any, device: torch.device) -> Any:
    """Returns a deep copy of a value of the optimizer state, with tensors on `device`. Tensors
    without dimensions, such as step counts, stay on the device where the optimizer keeps them."""
    return pytree.tree_map_only(
        torch.Tensor,
        lambda t: t.detach().to(device, copy=True) if t.dim() else t.detach().clone(),
        value,
    )


# --------------------------------------------------------------------------------------- resharding

MOST_COPIES: Final = 4
"""Maximum number of other ranks' shards that a rank keeps copies of. Limited because a rank reports
its shards in a message of fixed length."""
_MOST_ROWS: Final = 2 + MOST_COPIES // 2
"""Number of rows in a rank's report of its shards: one for its current sharding, one for its
previous sharding, and one for every two copies."""


class Messages(Protocol):
    """Interface for exchanging messages among ranks."""

    @property
    def rank(self) -> int: ...
    def exchange(self, payload: bytes) -> list[bytes]:
        """Sends `payload` to all ranks and returns all ranks' payloads in rank order."""
        ...


class Peers(Messages, Protocol):
    """Interface to the ranks among which shards are moved."""

    @property
    def world_size(self) -> int: ...
    def all_gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Returns the `values` of all ranks, in rank order."""
        ...

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
    ) -> None:
        """Sends one part of a flat tensor to each rank, and receives one part from each rank.
        `output_sizes`: number of elements received from each rank. `input_sizes`: number of
        elements sent to each rank."""
        ...


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A sharding, and the positions of this rank's shards in it."""

    number: int
    """Number of the generation that sharded the state. Newer shardings have higher numbers."""
    world_size: int
    """Number of shards."""
    position: int
    mirrored: int | None

    def row(self) -> list[int]:
        """Encodes the sharding as a list of integers."""
        return [
            self.number,
            self.world_size,
            self.position,
            -1 if self.mirrored is None else self.mirrored,
        ]


WHOLE: Final = Cut(number=0, world_size=1, position=0, mirrored=None)
"""Used by a rank that has the complete state and has not sharded it yet. If its peers have sharded
the state, the rank's state is older than theirs."""


@dataclass(frozen=True, kw_only=True)
class RankShards:
    """This rank's shards of one sharding, by unit, position and vector."""

    cut: Cut
    vectors: list[dict[int, Mapping[str, torch.Tensor]]]
    scalars: list[dict[int, list[dict[str, Any]]]] | None = None
    """Scalars of the optimizer state, by unit, position and parameter, if tensors are not split;
    otherwise None, because every rank has the scalars of all parameters."""
    copied: bool = False
    """True if these are copies of other ranks' shards, on the CPU. They are used only if no rank
    has the original shards any more."""


_NO_ROW: Final = [-1, 0, -1, -1, 0]


def rows_of(held: Sequence[RankShards]) -> list[int]:
    """Encodes this rank's shardings as integers. The length of the result is the same on every
    rank."""
    row = [value for each in held for value in (*each.cut.row(), int(each.copied))]
    assert len(row) <= _MOST_ROWS * len(_NO_ROW)
    return (row + _NO_ROW * _MOST_ROWS)[: _MOST_ROWS * len(_NO_ROW)]


def newest_of(rows: Sequence[Sequence[int]]) -> ShardHolders[int]:
    """Returns the newest complete sharding, with the ranks that have each of its shards. `rows`:
    all ranks' results of `rows_of`. Raises ShardsLostError if no sharding is complete."""
    reported = [
        (rank, entry)
        for rank, row in enumerate(rows)
        for entry in zip(*[iter(row)] * len(_NO_ROW), strict=True)
    ]
    return newest_complete(
        Claim(
            rank=rank,
            cut=number,
            shards=world_size,
            places={position, mirrored} - {-1},
            copied=bool(copied),
        )
        for rank, (number, world_size, position, mirrored, copied) in reported
        if number >= 0
    )


def held_of(held: Sequence[RankShards], number: int) -> RankShards | None:
    """Returns this rank's shards of the sharding with this number; None if it has none. The rank's
    own shards take precedence over copies of other ranks' shards."""
    own = sorted(
        (each for each in held if each.cut.number == number), key=lambda each: not each.copied
    )
    if len(own) < 2:
        return own[0] if own else None
    merged: list[dict[int, Mapping[str, torch.Tensor]]] = [{} for _ in own[0].vectors]
    scalars: list[dict[int, list[dict[str, Any]]]] = [{} for _ in own[0].vectors]
    for each in own:
        for unit, by_position in enumerate(each.vectors):
            merged[unit].update(by_position)
        for unit, of_position in enumerate(each.scalars or ()):
            scalars[unit].update(of_position)
    return RankShards(
        cut=own[-1].cut, vectors=merged, scalars=scalars if own[-1].scalars is not None else None
    )


def merge_copies(
    kept: Sequence[RankShards],
    newest: ShardHolders[int],
    arrived: Sequence[Mapping[int, dict[str, torch.Tensor]]],
    scalars: Sequence[list[dict[str, Any]]] | None = None,
) -> list[RankShards]:
    """Merges copies of shards that this rank already keeps with newly received copies. Earlier
    copies that do not belong to the sharding `newest` are dropped. `arrived`: for each unit, the
    received copies by position. `scalars`: scalars of all parameters, if tensors are not split;
    otherwise None."""
    vectors: list[dict[int, Mapping[str, torch.Tensor]]] = [dict(own) for own in arrived]
    for each in kept:
        if each.cut.number == newest.cut:
            for unit, own in enumerate(each.vectors):
                vectors[unit] |= own
    positions = sorted({position for own in vectors for position in own})
    pairs = [positions[at : at + 2] for at in range(0, len(positions), 2)]
    return [
        RankShards(
            cut=Cut(
                number=newest.cut,
                world_size=newest.shards,
                position=pair[0],
                mirrored=pair[1] if len(pair) > 1 else None,
            ),
            vectors=[{position: own[position] for position in pair} for own in vectors],
            scalars=[dict.fromkeys(pair, own) for own in scalars] if scalars is not None else None,
            copied=True,
        )
        for pair in pairs
    ]


VALUES = ""
"""Name of the vector with the parameters' values. The other vectors are named after the optimizer's
element states."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveVectors(Mapping[str, torch.Tensor]):
    """Vectors of one of this rank's shards, by name, read from the current state on request. An
    element state is copied only when it is requested."""

    unit: Unit
    holding: Holding
    state: ShardedOptimizerState
    dtypes: Mapping[str, torch.dtype]
    """Dtypes of the element states, by name."""

    @override
    def __getitem__(self, name: str) -> torch.Tensor:
        if name == VALUES:
            return self.holding.shard
        return self.state.shard(self.unit, self.holding, name, self.dtypes[name])

    @override
    def __contains__(self, name: object) -> bool:
        return name == VALUES or name in self.dtypes  # without assembling the vector

    @override
    def __iter__(self) -> Iterator[str]:
        return iter((VALUES, *self.dtypes))

    @override
    def __len__(self) -> int:
        return 1 + len(self.dtypes)

    def ranges(self, name: str) -> list[tuple[int, torch.Tensor]]:
        """Returns the element state `name` as ranges (`ShardedOptimizerState.ranges`)."""
        return self.state.ranges(self.unit, self.holding, name, self.dtypes[name])


def hold(
    units: Sequence[Unit],
    state: ShardedOptimizerState,
    cut: Cut,
    keys: Sequence[Mapping[str, torch.dtype]],
    *,
    live: bool = False,
) -> RankShards:
    """Returns this rank's current shards. The values of parameters share memory with the units.
    Element states are copied now or, if `live` is True, when they are requested (`LiveVectors`)."""
    vectors: list[dict[int, Mapping[str, torch.Tensor]]] = [{} for _ in units]
    scalars: list[dict[int, list[dict[str, Any]]]] = [{} for _ in units]
    for number, (unit, own) in enumerate(zip(units, keys, strict=True)):
        for holding in unit.holdings:
            if holding.position is not None:
                found = LiveVectors(unit=unit, holding=holding, state=state, dtypes=own)
                vectors[number][holding.position] = found if live else dict(found)
                scalars[number][holding.position] = state.scalars_of(unit, holding)
    return RankShards(
        cut=cut,
        vectors=vectors,
        scalars=scalars if any(unit.layout.whole_tensors for unit in units) else None,
    )


def vector_of(
    unit: Unit, shards: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the vector `name` of a shard. Returns zeros if tensors are not split and no tensor in
    the shard has this element state."""
    if name in shards or not unit.layout.whole_tensors:
        return shards[name]
    return torch.zeros_like(shards[VALUES], dtype=dtype)


def gather_from_owners(
    units: Sequence[Unit], sends: Mapping[int, int], mine: RankShards | None, peers: Messages
) -> tuple[list[list[dict[str, Any]]], list[dict[str, torch.dtype]]]:
    """Returns the `scalars` and `element_keys` of all units, as sent by the rank that sends the
    shard at each position. Used if tensors are not split. Must be called on every rank; all ranks
    get the same result.

    Args:
        sends: for each position, the rank that sends its shard.
        mine: this rank's shards of that sharding (`held_of`); None if it has none.

    Raises:
        ConfigurationError (STATE_UNSUPPORTED): the optimizer's state cannot be sent.
        MembershipChanged: the group has ended.
    """
    own: dict[str, dict[str, Any]] = {}
    for position in (p for p, rank in sends.items() if rank == peers.rank):
        assert mine is not None
        assert mine.scalars is not None
        for number, by_position in enumerate(mine.scalars):
            for index, state in enumerate(by_position[position]):
                if state:
                    own[f"{number}/{index}"] = state
    structure, tensors = flatten(own)
    scalars: list[list[dict[str, Any]]] = [[{} for _ in unit.parameters] for unit in units]
    for payload in peers.exchange(dump_tensors(tensors, {"structure": structure})):
        received, about = load_tensors(payload)
        for name, state in unflatten(about["structure"], received).items():
            number, _, index = name.partition("/")
            scalars[int(number)][int(index)] = state
    keys = [
        dict.fromkeys(
            sorted({key for state in states for key in state.get(ELEMENTS, ())}), unit.dtype
        )
        for unit, states in zip(units, scalars, strict=True)
    ]
    return scalars, keys


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
    """Reshards all units across `peers`. Must be called on every rank. Returns the new sharding,
    and this rank's shards of the previous one. If an error is raised, nothing has changed.

    Args:
        held: this rank's shards, by sharding; empty on a joiner.
        scalars, keys: scalars and element keys of the optimizer state, by unit; the same on all
            ranks. Both are ignored if tensors are not split, because the owners of the tensors then
            send them.
        number: number of the new sharding.
        division: how `peers` are divided into replicas.

    Raises:
        ShardsLostError: no sharding is complete.
        MembershipChanged: the group has ended.
    """
    rank, world_size = peers.rank, peers.world_size
    newest = newest_of(peers.all_gather_integers(rows_of(held)))
    old_world, sends = newest.shards, newest.senders()
    mine = held_of(held, newest.cut)
    if any(unit.layout.whole_tensors for unit in units):
        scalars, keys = gather_from_owners(units, sends, mine, peers)
    gets = [division.held(r) for r in range(world_size)]
    fresh: list[dict[int, dict[str, torch.Tensor]]] = []
    for index, unit in enumerate(units):
        old, new = unit.layout.over(old_world), unit.layout.over(division.shards)
        table = runs(old=old, new=new, sends=sends, gets=gets)
        received, sent = sizes(table, rank)
        arrived: dict[int, dict[str, torch.Tensor]] = {position: {} for position in gets[rank]}
        for name, dtype in {VALUES: unit.dtype, **keys[index]}.items():
            here = mine.vectors[index] if mine is not None else {}
            held_here = {  # copies are on the CPU
                position: vector_of(unit, vectors, name, dtype).to(unit.placement.device)
                for position, vectors in here.items()
            }
            outgoing = message(table, rank, held_here or {0: torch.empty(0, dtype=dtype)}).to(
                unit.device
            )
            incoming = torch.empty(sum(received), dtype=dtype, device=unit.device)
            peers.all_to_all(incoming, outgoing, received, sent)
            shards = {
                position: torch.zeros(new.shard_numel, dtype=dtype, device=unit.placement.device)
                for position in gets[rank]
            }
            place(table, rank, incoming, shards)
            for position, shard in shards.items():
                arrived[position][name] = shard
        fresh.append(arrived)
    peers.all_gather_integers([number])  # every rank has received everything
    cut = division_cut(division, rank, number)
    for unit, arrived, own in zip(units, fresh, scalars, strict=True):
        unit.adopt(
            cut.world_size,
            {position: vectors[VALUES] for position, vectors in arrived.items()},
            cut.position,
            cut.mirrored,
        )
        element = {
            position: {k: v for k, v in vectors.items() if k != VALUES}
            for position, vectors in arrived.items()
        }
        state.replace(unit, own, element)
    return cut, mine


def division_cut(division: Division, rank: int, number: int) -> Cut:
    """Returns the `Cut` of `rank` in this division. `number`: number of the sharding."""
    return Cut(
        number=number,
        world_size=division.shards,
        position=division.position(rank),
        mirrored=division.mirrored(rank),
    )
