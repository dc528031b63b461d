"""Parameters and optimizer state of one model on this rank: unsharded at first, then sharded across
the ranks of a group.

This module shards and reshards the state. It also assembles the complete state
(`unsharded_vectors.py`) for checkpoints, operations between steps, and the user. It is independent
of steps (`engine.py`) and of gathering during passes (`execution.py`). May be used only on the
training thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from shoal_common.errors import PreconditionError
from torch import nn
from typing_extensions import override

from shoal_worker.elastic.contract.channel import Channel, LocalChannel
from shoal_worker.elastic.contract.generation import Topology
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.state.schedulers_and_scalers import GroupMembers
from shoal_worker.engine.state.hidden_parameters import inside
from shoal_worker.engine.state.holders import ShardsLostError
from shoal_worker.engine.state.module_state import ModuleState, load_captured
from shoal_worker.engine.state.optimizer_state import is_element
from shoal_worker.engine.state.parameters import unsaved_buffers
from shoal_worker.engine.state.partitioned_state import PartitionedState
from shoal_worker.sharding.execution import ShardedExecution
from shoal_worker.sharding.layout import Division, among_all
from shoal_worker.sharding.mirrors import TravellingMirrors
from shoal_worker.sharding.resharding import (
    VALUES,
    WHOLE,
    Cut,
    RankShards,
    ShardedOptimizerState,
    division_cut,
    gather_from_owners,
    hold,
    merge_copies,
    reshard,
)
from shoal_worker.sharding.unit import Stage, Unit
from shoal_worker.sharding.unsharded_vectors import (
    ParameterIndex,
    agree,
    assemble,
    copy_singles,
    optimizer_state,
    own_runs,
    spread,
)
from shoal_worker.state.digest import state_tensors
from shoal_worker.state.tree import StatePart

_log = logging.getLogger(__name__)

_MUCH_PADDING: Final = 2.0
"""A warning is logged if padding enlarges the state to more than this multiple of the model's
size."""


class ShardedState(PartitionedState):
    """State of a model's units, and of the optimizer that updates them."""

    def __init__(
        self,
        module: nn.Module,
        execution: ShardedExecution,
        stage: Stage,
        divide: Callable[[Topology], Division] = among_all,
    ) -> None:
        """`divide`: function that divides the ranks into replicas, given their distribution across
        hosts."""
        self.module = module
        self.units: Sequence[Unit] = execution.units
        self.trained = [unit for unit in execution.units if unit.trained]
        self.cut: Cut | None = WHOLE
        """The current sharding, with the positions of this rank's shards. None on a joiner that has
        not received shards yet."""
        self.division = Division(world_size=1, shards=1)
        """Division of the current ranks into replicas."""
        self._divide = divide
        self._execution = execution
        self._stage = stage
        self._before: RankShards | None = None
        """Shards of the previous sharding, until the next commit; None if there are none."""
        self._copies: list[RankShards] = []
        """Copies of shards that only one other rank has, until the next resharding."""
        self._places: list[list[ParameterIndex]] = []
        """Parameters in each of the optimizer's groups, in the user's order, as unit and index."""
        self._state = ShardedOptimizerState(None)
        self.mirrors = TravellingMirrors(self.units, "device")
        self.whole_tensors = False
        """True if the optimizer needs entire tensors, so each tensor has one owner."""
        self._scalars: list[list[dict[str, Any]]] = [
            [{} for _ in unit.parameters] for unit in self.units
        ]
        self._keys: list[dict[str, torch.dtype]] = [{} for _ in self.units]
        """On a joiner that has not received shards yet: names and dtypes of the optimizer's element
        states."""

    def keep_tensors_whole(self) -> None:
        """Assigns every tensor to one rank instead of splitting it. Must be called before
        `use_optimizer` and before the first sharding."""
        self.whole_tensors = True
        for number, unit in enumerate(self.units):
            unit.keep_tensors_whole(number)

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Sets the optimizer that updates the units' pieces."""
        where = {
            id(p): (u, i)
            for u, unit in enumerate(self.units)
            for i, p in enumerate(unit.parameters)
        }
        # Adagrad creates its state in its constructor
        made = {where[id(p)]: optimizer.state.pop(p) for p in list(optimizer.state)}
        self._places = [[where[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        for group, places in zip(optimizer.param_groups, self._places, strict=True):
            group["params"] = GroupMembers(
                holding.pieces[i] for u, i in places for holding in self.units[u].holdings
            )
        for (u, i), own in made.items():
            piece, shape = self.units[u].own.pieces[i], self.units[u].layout.shapes[i]
            optimizer.state[piece] = {
                key: value.detach().to(piece.device).reshape(piece.shape)
                if is_element(value, key, shape)
                else value
                for key, value in own.items()
            }
        self.optimizer = optimizer
        self._state = ShardedOptimizerState(optimizer)

    # ------------------------------------------------------------------------------------- sharding

    @property
    def whole(self) -> bool:
        """True if the state is not sharded yet, so that this rank has all of it."""
        return self.cut is WHOLE

    def cut_whole(self, *, number: int, rank: int, topology: Topology) -> None:
        """Shards the state for the first time. Does not communicate, because every rank has the
        complete state. `topology`: distribution of the ranks across hosts."""
        self.division = self._divide(topology)
        cut = division_cut(self.division, rank, number)
        for unit in self.units:
            self._state.cut(
                unit, self._state.element_keys(unit), cut.world_size, cut.position, cut.mirrored
            )
        self._execution.free_all()
        self.cut = cut
        self._warn_of_padding()

    def reshard(self, group: Group) -> None:
        """Reshards the state across the ranks of a new group, using the shards that these ranks
        have. Must be called on every rank.

        Raises:
            ShardsLostError: a shard and its mirror are both lost.
            MembershipChanged: the group has ended.
        """
        number = group.generation.number
        if self.cut is not None and self.cut.number == number:
            return
        received = [
            row[0]
            for row in group.all_gather_integers([int(self.cut is not None and not self.whole)])
        ]
        if not any(received):
            return  # no step has begun on any rank
        if self.cut is not None:
            self._scalars = [self._state.scalars(unit) for unit in self.units]
            self._keys = [self._state.element_keys(unit) for unit in self.units]
        held = self._held()
        division = self._divide(group.generation.topology)
        cut, self._before = reshard(
            self.units,
            self._state,
            held,
            self._scalars,
            self._keys,
            group,
            number=number,
            division=division,
        )
        self.cut, self.division, self._copies = cut, division, []
        self._warn_of_padding()
        if self._stage is not Stage.PARAMETERS:
            self._execution.gather_all()

    def _warn_of_padding(self) -> None:
        """Logs a warning if padding takes much memory. If tensors are not split, all shards of a
        unit are padded to the length of the unit's longest shard."""
        whole, padded = (
            sum(unit.layout.numel for unit in self.units),
            sum(unit.layout.padded_numel for unit in self.units),
        )
        if self.whole_tensors and padded > _MUCH_PADDING * whole:
            _log.warning(
                "tensors are not split (whole_tensors): each is assigned to one of %d ranks, and "
                "all shards of a block are padded to the size of the largest. With padding, the "
                "model takes %.1f times its size, in memory and on the wire; choose larger "
                "blocks, with bucket_cap_mb= (zero1, zero2) or shard_modules=",
                self.division.shards,
                padded / whole,
            )

    def check_dtypes(self) -> None:
        """Calls `ShardedOptimizerState.check_dtypes` for all units."""
        for unit in self.units:
            self._state.check_dtypes(unit)

    def updated(self) -> None:
        """Moves optimizer state and mirrors back to the memory that stores them. Must be called
        after an optimizer step."""
        for unit in self.trained:
            if unit.placement.keeps_files:
                self._state.move_to_placement(unit)
        self.mirrors.put_away(self.optimizer, updated=True)

    def bring_mirrors(self) -> None:
        """Moves this rank's mirrors to the device."""
        self.mirrors.bring(self.optimizer)

    def committed(self) -> None:
        """Drops the shards of the previous sharding. Must be called once a step has been applied to
        the current sharding."""
        self._before, self._copies = None, []

    def copy_singles(self, channel: Channel, leaving: Collection[int]) -> None:
        """Finds the shards that only one rank has, and copies each of them to a second rank
        (`TrainingEngine.keep_two_copies`). `leaving`: ranks that are about to leave."""
        if self.cut is not None:
            try:
                held, scalars, keys = self._agreed(channel)
            except ShardsLostError:
                return  # resharding reports this
            copied = copy_singles(self.units, held, keys, channel, leaving)
            if copied is not None:
                # Stored first, because a leaving rank exits as soon as it has received all other
                # ranks' messages below.
                self._copies = merge_copies(
                    self._copies, *copied, scalars if self.whole_tensors else None
                )
                channel.exchange(b"")

    def in_common(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns the tensors of this rank that can be compared with those of other ranks, grouped
        under descriptions: the shards that it owns or mirrors, and unsharded parameters."""
        self.bring_mirrors()
        state = self.optimizer.state if self.optimizer is not None else {}
        shards: dict[int, dict[str, torch.Tensor]] = {}
        for unit in self.units:
            for holding in unit.holdings:
                if holding.position is not None:
                    named = zip(unit.parameter_names, holding.pieces, strict=True)
                    pieces = {name: piece for name, piece in named if piece.numel()}
                    values = {
                        f"its piece of {name!r}": piece.detach() for name, piece in pieces.items()
                    }
                    shards.setdefault(holding.position, {}).update(
                        values | state_tensors(state, pieces)
                    )
        common = {f"shard {position}": tensors for position, tensors in sorted(shards.items())}
        if self._stage is not Stage.PARAMETERS:
            with inside():
                named_parameters = [
                    each
                    for unit in self.units
                    for each in zip(unit.parameter_names, unit.parameters, strict=True)
                ]
                common["the parameters"] = {
                    repr(name): parameter.detach() for name, parameter in named_parameters
                }
        return common

    def _held(self, *, values_alone: bool = False, live: bool = False) -> list[RankShards]:
        """Returns this rank's shards of the current and the previous sharding, and its copies of
        other ranks' shards. `values_alone`: True to omit the optimizer's state. `live`: see
        `hold`."""
        self.bring_mirrors()
        keys = [{} if values_alone else self._state.element_keys(unit) for unit in self.units]
        held = (
            [hold(self.units, self._state, self.cut, keys, live=live)]
            if self.cut is not None
            else []
        )
        return held + ([self._before] if self._before is not None else []) + self._copies

    def _agreed(
        self, channel: Channel, *, live: bool = False
    ) -> tuple[list[RankShards], list[list[dict[str, Any]]], list[dict[str, torch.dtype]]]:
        """Returns this rank's shards, and the scalars and element keys of the complete optimizer
        state. If tensors are not split, the owners send the scalars and keys. Must be called on all
        ranks, within an operation. Raises the same errors as `reshard`. `live`: see `hold`."""
        held = self._held(live=live)
        if self.whole_tensors:
            sends, mine, _ = agree(held, channel)
            return held, *gather_from_owners(self.units, sends, mine, channel)
        return (
            held,
            [self._state.scalars(unit) for unit in self.units],
            [self._state.element_keys(unit) for unit in self.units],
        )

    # ----------------------------------------------------------------------- the part on every rank

    def capture_common(self) -> dict[str, Any]:
        """Returns the part of the state that is the same on all ranks: buffers, and the optimizer's
        settings and counts."""
        return {
            "unsaved": unsaved_buffers(self.module),
            "buffers": ModuleState(self.module).beside_parameters(),
            "settings": self.settings,
            "scalars": [
                [{} for _ in unit.parameters] if self.whole_tensors else self._state.scalars(unit)
                for unit in self.units
            ],
            "keys": [
                {
                    k: str(v).removeprefix("torch.")
                    for k, v in self._state.element_keys(unit).items()
                }
                for unit in self.units
            ],
        }

    def restore_common(self, state: Mapping[str, Any]) -> None:
        """Restores the result of a peer's `capture_common`. If this rank had not sharded its state,
        it drops the state, and receives its shards in `reshard`."""
        load_captured(self.module, state["buffers"])
        self.settings = state["settings"]
        if self.whole:
            self.cut = None
        self._scalars = state["scalars"]
        self._keys = [{k: getattr(torch, v) for k, v in own.items()} for own in state["keys"]]

    # --------------------------------------------------------------------------- the complete state

    @override
    def assemble(self, channel: Channel) -> dict[str, Any]:
        held, scalars, keys = self._agreed(channel)
        return self._as_one_process(assemble(self.units, held, keys, channel), scalars)

    def capture_unsharded(self) -> dict[str, Any]:
        """Returns the state in the format of `assemble`. This rank must have all of it."""
        keys = [self._state.element_keys(unit) for unit in self.units]
        scalars = [self._state.scalars(unit) for unit in self.units]
        return self._as_one_process(
            [vectors[0] for vectors in hold(self.units, self._state, WHOLE, keys).vectors], scalars
        )

    def part(self, channel: Channel) -> StatePart | None:
        """Returns this rank's part of the complete state, for a sharded checkpoint; None if the
        rank has the complete state. Must be called on all ranks, within an operation. Raises the
        same errors as `reshard`."""
        if self.cut is None or isinstance(channel, LocalChannel):
            return None
        held, scalars, keys = self._agreed(channel, live=True)
        outlines = [
            {
                name: torch.empty(unit.layout.numel, dtype=dtype, device="meta")
                for name, dtype in {VALUES: unit.dtype, **own}.items()
            }
            for unit, own in zip(self.units, keys, strict=True)
        ]
        count, shards = own_runs(self.units, held, outlines, channel)
        if count == 1:
            return None
        return StatePart(state=self._as_one_process(outlines, scalars), count=count, shards=shards)

    def _as_one_process(
        self,
        wholes: Sequence[Mapping[str, torch.Tensor]],
        scalars: Sequence[Sequence[Mapping[str, Any]]],
    ) -> dict[str, Any]:
        """Returns the state in the format of a single process. `wholes`: for each unit, its
        complete vectors (parameters, element states) by name. `scalars`: for each unit, the scalars
        of the optimizer state."""
        saved = (
            optimizer_state(self._places, self.settings, self.units, scalars, wholes)
            if self.optimizer is not None
            else None
        )
        unsaved = unsaved_buffers(self.module)
        return {"model": self._named(wholes), "optimizer": saved} | (
            {"buffers": unsaved} if unsaved else {}
        )

    def restore_unsharded(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `assemble`, possibly of another strategy. The state is then
        unsharded until the next step begins."""
        self.check(state)
        for unit in self.units:
            unit.make_unsharded()
        load_captured(self.module, state["model"])
        if state["optimizer"] is not None and self.optimizer is not None:
            self.load_optimizer(state["optimizer"])
        self.cut, self._before, self._copies = WHOLE, None, []

    @override
    def load_optimizer(self, saved: Mapping[str, Any]) -> None:
        self._check_optimizer(saved)
        self._before, self._copies = None, []  # these shards contain the previous state
        spread(self._places, saved, self.units, self._state)
        self.settings = [
            {k: v for k, v in group.items() if k != "params"} for group in saved["param_groups"]
        ]

    def _group_shapes(self) -> list[list[torch.Size]]:
        return [[self.units[u].layout.shapes[i] for u, i in places] for places in self._places]

    @override
    def values(self, channel: Channel) -> dict[str, torch.Tensor]:
        if self.cut is None:
            return ModuleState(self.module).captured()
        return self._named(self._unsharded_values(channel))

    def _unsharded_values(self, channel: Channel) -> Sequence[Mapping[str, torch.Tensor]]:
        assert self.cut is not None
        if isinstance(channel, LocalChannel) and self.cut.world_size > 1:
            raise PreconditionError(
                "the job was stopped and other ranks have left, so no rank has all parameters"
            )
        nothing: list[dict[str, torch.dtype]] = [{} for _ in self.units]
        return assemble(self.units, self._held(values_alone=True), nothing, channel)

    def make_unsharded_again(self, channel: Channel) -> None:
        """Restores the unsharded state on all ranks if only some ranks have sharded it. Ranks may
        have left since then. No update is lost, because no step has been applied to the incomplete
        sharding. Must be called on all ranks, within an operation. Raises the same errors as
        `reshard`."""
        received = channel.exchange(b"whole" if self.whole else b"")
        if all(received) or not any(received):
            return
        state = self.assemble(channel)
        if not self.whole:
            self.restore_unsharded(state)

    def fill(self, channel: Channel) -> None:
        """Fetches the current values of unsharded parameters from the ranks that update them. Must
        be called on all ranks, within an operation. Raises the same errors as `reshard`."""
        if self._stage is Stage.PARAMETERS or self.cut is None:
            return
        # even if this rank has not sharded its state yet, because a peer may have begun the first
        # step
        wholes = self._unsharded_values(channel)
        if self.whole:
            return
        for unit, vectors in zip(self.units, wholes, strict=True):
            unit.fill(vectors[VALUES])

    @contextlib.contextmanager
    def unsharded_for(self, channel: Channel) -> Iterator[None]:
        """Context in which the parameters are unsharded on this rank, so that any code can compute
        with them. Must be entered on all ranks, within an operation. Raises the same errors as
        `reshard`."""
        if self.cut is None:
            yield
            return
        wholes = self._unsharded_values(channel)
        if self.whole:
            yield
            return
        with torch.no_grad():
            for unit, vectors in zip(self.units, wholes, strict=True):
                unit.fill(vectors[VALUES])
        self._execution.pinned = True
        try:
            yield
        finally:
            self._execution.free_all()

    @override
    def load_values(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._check_values(tensors)
        self._before, self._copies = None, []  # these shards contain the previous values
        keys = {
            id(tensor): key
            for key, tensor in ModuleState(self.module).tensors.items()
            if key in tensors
        }
        for unit in self.units:
            unit.load([tensors[keys[id(p)]] for p in unit.parameters])
        beside = ModuleState(self.module).beside_parameters()
        load_captured(self.module, {key: value for key, value in tensors.items() if key in beside})

    def _shapes(self) -> dict[str, torch.Size | None]:
        shapes = {
            id(p): shape
            for unit in self.units
            for p, shape in zip(unit.parameters, unit.layout.shapes, strict=True)
        }
        state = ModuleState(self.module)
        return state.shapes() | {
            key: shapes[id(tensor)] for key, tensor in state.tensors.items() if id(tensor) in shapes
        }

    def _named(self, wholes: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
        """Returns the module's state dict, with the given values for its parameters."""
        views = {
            id(parameter): view
            for unit, whole in zip(self.units, wholes, strict=True)
            for parameter, view in zip(
                unit.parameters, unit.layout.over(1).views(whole[VALUES]), strict=True
            )
        }
        state = ModuleState(self.module)
        named = {
            key: views[id(tensor)] for key, tensor in state.tensors.items() if id(tensor) in views
        }
        return {key: named.get(key, value) for key, value in state.captured().items()}
