"""State of one model and its optimizer on this rank: at first the complete state, later only this
rank's part of it.

The user's module remains the same object. Its layers are changed in place and get different
parameters each time a mesh is formed. The optimizer updates `pieces`, plain tensors that share
memory with the layers' parameters. If the parameters are sharded along the data axis, it updates
this rank's shards of them instead (`data_axis.py`). May be used only on the training thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from shoal_worker.elastic.contract.channel import Channel
from shoal_worker.engine.state.hidden_parameters import (
    HiddenParameter,
    Whereabouts,
    drop_gradient,
    gradient_of,
    hide,
    hide_gradient,
    refuse_hooks,
    show,
    show_gradient,
)
from shoal_worker.engine.state.module_state import ModuleState, load_captured, other_entries
from shoal_worker.engine.state.optimizer_state import as_made_by, is_element
from shoal_worker.engine.state.parameter_groups import checkpoint_activations
from shoal_worker.engine.state.parameters import unsaved_buffers
from shoal_worker.engine.state.partitioned_state import PartitionedState
from shoal_worker.mesh.data_axis import DataAxis, Replicated, State
from shoal_worker.mesh.layouts import Axes, Blueprint, Coordinate, Template
from shoal_worker.mesh.resharding import (
    MeshCut,
    PieceState,
    RankParts,
    WholeTensor,
    copy_singles,
    gather,
)
from shoal_worker.mesh.step_group import GroupMesh
from shoal_worker.pipelining.partial import empty_on
from shoal_worker.pipelining.split import named_tensors
from shoal_worker.state.digest import state_tensors
from shoal_worker.state.serial import dump_tensors, load_tensors
from shoal_worker.state.tree import flatten, unflatten
from shoal_worker.tensor_parallel.context import DropoutRandomness
from shoal_worker.tensor_parallel.layers import parallelize, unparallelize

# ----------------------------------------------------------------- parameters hidden between passes
#
# Hides parts of a module's parameters between passes, while this rank has only its own part of
# them. The values of a parameter that is split or on another stage are hidden, because a torch call
# on this rank's part would not have the effect that the script intends. The gradients of all
# trained parameters are hidden until they are summed across replicas. Everything is visible in
# passes. See `engine/state/hidden_parameters.py`.


class HiddenParameters:
    """Hides the parameters of one module, on its current mesh, between passes."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], whereabouts: Whereabouts) -> None:
        """Prepares to hide the parameters of one module. `parameters`: all parameters of the
        module. Parameters of other ranks are on the meta device."""
        self._whereabouts = whereabouts
        self._all = [
            (parameter, HiddenParameter(name, whereabouts))
            for name, parameter in parameters.items()
        ]
        self._absent = [each for each in self._all if each[0].is_meta]
        self._split = [
            each for each in self._all if isinstance(each[0], DTensor) and not each[0].is_meta
        ]
        self._trained = [each for each in self._all if each[0].requires_grad]
        self._handed_out = False
        """True if the parameters' gradients are the final sums that the optimizer uses."""

    def hide(self) -> None:
        """Hides the parameters after a pass."""
        if not self._handed_out:
            if any(gradient_of(parameter) is not None for parameter, _ in self._trained):
                self._whereabouts.pending = True
            for _, place in self._trained if self._whereabouts.pending else ():
                place.gradient = True
        for parameter, place in (*self._absent, *self._split):
            hide(parameter, place)
        for parameter, place in self._trained:
            if place.gradient:
                hide_gradient(parameter, place)

    def handed_out(self, updated: Iterable[torch.Tensor]) -> None:
        """Records that the step's gradients have been summed and that the parameters have the
        gradients for this rank's update. From now on, the script must not set other gradients.

        `updated`: tensors that the optimizer updates. If no rank has used one of these tensors, it
        has no gradient on any rank.
        """
        self._handed_out = True
        own = {id(piece) for piece in updated}
        for parameter, place in self._trained:
            place.gradient = (
                place.gradient and gradient_of(parameter) is None and id(parameter) not in own
            )
            hide_gradient(parameter, place)

    @property
    def are_split(self) -> bool:
        """True if some parameters of this module are split across ranks of one replica."""
        return bool(self._split)

    @contextlib.contextmanager
    def carrying(self) -> Iterator[None]:
        """Context for applying a committed step. On exit, drops the step's gradients. Until the
        script clears the gradients, `.grad` of these parameters remains a placeholder."""
        carried = [
            (parameter, place)
            for parameter, place in self._trained
            if place.gradient or gradient_of(parameter) is not None
        ]
        yield
        self.drop_gradients()
        for parameter, place in carried:
            place.gradient = True
            hide_gradient(parameter, place)

    @property
    def carries(self) -> bool:
        """True if any parameter has a gradient that is stored elsewhere, or had one in the last
        step that the script has not cleared."""
        return any(place.gradient for _, place in self._trained)

    def show(self) -> None:
        """Makes the parameters visible for a pass."""
        for parameter, place in self._split:
            show(parameter, place)
        self.show_gradients()

    def show_gradients(self) -> None:
        """Makes `.grad` of parameters whose values are on this rank an ordinary attribute again."""
        for parameter, place in self._trained:
            show_gradient(parameter, place)

    def drop_gradients(self) -> None:
        """Records that the parameters have no gradients on any rank."""
        self._handed_out = self._whereabouts.pending = False
        for parameter, place in self._trained:
            drop_gradient(parameter, place)

    def release(self) -> None:
        """Makes the parameters ordinary again, before a different object hides them."""
        for parameter, place in self._all:
            show(parameter, place)


# ---------------------------------------------------------------------------------------- the state

_ALONE = Axes(pipeline=1, tensor=1, data=1)

Shard = Callable[["ModelParts"], DataAxis]
"""Function that returns the data axis for a model's pieces, once the model is split."""


class ModelParts(PartitionedState):
    """State of one model and its optimizer on this rank."""

    def __init__(
        self,
        module: nn.Module,
        template: Template,
        device: torch.device,
        *,
        dropout: DropoutRandomness,
        checkpointed: Sequence[str],
        whereabouts: Whereabouts,
    ) -> None:
        """Wraps a module. `checkpointed`: names of modules with activation checkpointing.
        `whereabouts`: state shared by the model's hidden parameters."""
        self.module = module
        self.template = template
        self.cut: MeshCut | None = None
        """This rank's position on the mesh. None: this rank has the complete model."""
        self.blueprint: Blueprint | None = None
        self.pieces: dict[str, nn.Parameter] = {}
        """This rank's part of each parameter."""
        self.parameters: dict[str, Any] = {}
        """Objects that the module uses as its parameters on this rank: the pieces themselves, or
        DTensors around them."""
        self.data_axis: DataAxis = Replicated({})
        """Storage of the pieces."""
        self._group_names: list[list[str]] = []
        """Names of the parameters in each of the optimizer's groups, in the user's order."""
        self.whereabouts = whereabouts
        self.hidden = HiddenParameters({}, whereabouts)
        self._device = device
        self._dropout = dropout
        self._checkpointed = [module.get_submodule(name) for name in checkpointed]
        self._before: list[RankParts] = []
        """Parts for previous meshes, the newest first, until the next commit; there are several if
        forming a mesh has failed repeatedly. Also contains copies of data that only one other rank
        has."""
        self._blueprints: dict[Axes, Blueprint] = {}
        self._beside = frozenset(other_entries(module))
        """Keys of the module's extra state."""
        self._own_pieces()

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Implements `PartitionedState.use_optimizer`. The optimizer's groups already contain the
        pieces."""
        names = {id(parameter): name for name, parameter in self.pieces.items()}
        self._group_names = [
            [names[id(p)] for p in group["params"]] for group in optimizer.param_groups
        ]
        self.optimizer = optimizer

    def blueprint_for(self, axes: Axes) -> Blueprint:
        """Returns the `Blueprint` of the model on a mesh with these axes. Raises ConfigurationError
        if the model cannot be split in this way."""
        if axes not in self._blueprints:
            self._blueprints[axes] = Blueprint(self.template, axes)
        return self._blueprints[axes]

    @property
    def is_unsharded(self) -> bool:
        """True if this rank has the complete state, because the model is not split."""
        return self.cut is None and bool(self.pieces)

    @property
    def is_empty(self) -> bool:
        """True if this rank has no state, not even for a previous mesh."""
        return self.cut is None and not self.pieces and not self._before

    def is_trained(self, name: str) -> bool:
        """Returns whether a parameter is trained. `name`: its name in the unsplit model."""
        return self.template.tensors()[name].requires_grad

    # ------------------------------------------------------------------------------------ splitting

    def take(self, channel: Channel, axes: Axes, at: Coordinate | None) -> list[WholeTensor]:
        """Receives this rank's part of the state on new axes from the ranks that have it, as the
        input of `lay_out`. Must be called on every rank of `channel`. `at`: this rank's position on
        the new axes; None: it gets no part.

        Does not change the current state, because the transfer may fail at any time. No rank needs
        memory for more than a few unsplit tensors."""
        blueprint = self.blueprint_for(axes)
        parts = (
            self._taken(one, blueprint, at) if at is not None else None
            for one in gather(channel, self.held(), self.blueprint_for)
        )
        return [one for one in parts if one is not None]

    def lay_out(
        self,
        cut: MeshCut,
        mesh: GroupMesh | None,
        taken: Sequence[WholeTensor],
        shard: Shard | None,
    ) -> None:
        """Splits the model and its state for new axes. `cut`: the new axes and this rank's position
        on them. `mesh`: mesh of this rank's tensor-parallel group; None if the rank is alone in it.
        `taken`: the result of `take`. `shard`: function that shards the pieces along the data axis;
        None: no sharding."""
        blueprint = self.blueprint_for(cut.axes)
        # A failure from here on leaves the parts for previous meshes, and none for this one.
        self._before, self.pieces, self.cut = self.held(), {}, None
        self._lay_out_module(blueprint, cut.at, mesh)
        self.cut, self.blueprint = cut, blueprint
        self._own_pieces()
        here = {one.name: one for one in taken}
        self._put_values({name: one.value for name, one in here.items()})
        if shard is not None:
            self.data_axis = shard(self)
        self._point_optimizer(
            {
                name: {**one.elements, **one.rest}
                for name, one in here.items()
                if name in self.pieces
            }
        )

    def forget_before(self) -> None:
        """Discards the parts for previous meshes. Must be called once a step has been committed on
        the new mesh."""
        self._before = []

    def make_unsharded(self) -> None:
        """Allocates the complete state on this rank, with arbitrary values, until the state is
        split again."""
        self._strip()
        named = named_tensors(self.module)
        self._replace(
            {id(named[name]): empty_on(named[name], self._device) for name in self.template.names}
        )
        self._before, self.cut, self.blueprint = [], None, None
        self._own_pieces()
        self._point_optimizer({})

    def drop(self) -> None:
        """Drops all state, because this rank becomes a spare."""
        self._before = []
        self._strip()
        self.pieces, self.parameters, self.data_axis = {}, {}, Replicated({})
        self._point_optimizer({})
        self.cut = self.blueprint = None
        self.hide()

    def hide(self) -> None:
        """Hides the parameters of the split module between passes, as described in
        `HiddenParameters`."""
        named = named_tensors(self.module)
        parameters = {
            name: named[name]
            for name in self.template.names
            if name in self.template.parameter_names
        }
        refuse_hooks(parameters.items(), self.whereabouts.strategy)
        self.hidden = HiddenParameters(parameters, self.whereabouts)
        self.hidden.hide()

    def in_common(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns this rank's shards with their optimizer state, grouped under descriptions, for
        comparison with other ranks."""
        assert self.cut is not None
        at, common = self.cut.at, {}
        for position, runs in self.data_axis.runs(self.optimizer).items():
            ordered = dict(sorted(runs.items()))
            values = {repr(name): run.value for name, run in ordered.items()}
            moments = state_tensors(
                {name: run.state for name, run in ordered.items()}, {name: name for name in ordered}
            )
            common[f"part {at.pipeline}.{at.tensor}, shard {position}"] = values | moments
        return common

    def held(self) -> list[RankParts]:
        """Returns this rank's parts, the newest first. They are the input of `gather`."""
        own = self.hold()
        return [*([own] if own is not None else []), *self._before]

    def copy_singles(self, channel: Channel, leaving: Collection[int]) -> None:
        """Implements `TrainingEngine.keep_two_copies`."""
        copied = copy_singles(channel, self.held(), self.blueprint_for, leaving)
        if copied is not None:
            # copied first, because a leaving rank exits once it has received all other ranks'
            # messages below
            self._before = [*self._before, *copied]
            channel.exchange(b"")

    def hold(self) -> RankParts | None:
        """Returns this rank's part of the split state. While the model is not split, returns the
        complete state, as part of a mesh of one rank with the number -1. Returns None if this rank
        has no state."""
        if not self.pieces and self.cut is None:
            return None
        cut = self.cut or MeshCut(number=-1, axes=_ALONE, at=Coordinate(0, 0, 0))
        named = named_tensors(self.module)
        others = {
            name: named[name]
            for name in self.template.names
            if name not in self.pieces and not named[name].is_meta
        }
        nothing: dict[int, dict[str, PieceState]] = {position: {} for position in cut.positions}
        runs = nothing | self.data_axis.runs(self.optimizer)
        if 0 in runs:
            runs[0] |= {
                name: PieceState(value=tensor.detach(), state={}) for name, tensor in others.items()
            }
        return RankParts(cut=cut, runs=runs)

    def make_unsharded_again(self, channel: Channel) -> bool:
        """Restores the complete state on all ranks if only some ranks have split it. Ranks may have
        left since then. No update is lost, because no step has been applied since the split.
        Returns True if this rank had split its state. Must be called on all ranks, within an
        operation. Raises the same errors as `gather`."""
        received = channel.exchange(b"whole" if self.is_unsharded else b"")
        if all(received) or not any(received):
            return False
        state = self._as_one_process(channel)
        if self.is_unsharded:
            return False
        self.take_unsharded(state)
        return True

    def gather_unsharded(self, channel: Channel) -> dict[str, Any]:
        """Assembles the complete state from the ranks' parts and returns it. Must be called on all
        ranks. Raises the same errors as `gather`."""
        state = self._as_one_process(channel)
        channel.exchange(b"")  # all ranks have the state; this rank's part is needed until then
        return state

    def take_unsharded(self, state: Mapping[str, Any]) -> None:
        """Loads the complete state on this rank, which must have enough memory for it."""
        self.make_unsharded()
        self.load_values(state["model"])
        if state["optimizer"] is not None:
            self.load_optimizer(state["optimizer"])

    def _taken(self, one: WholeTensor, blueprint: Blueprint, at: Coordinate) -> WholeTensor | None:
        """Returns this rank's part of one tensor; None if it has no part."""
        if not blueprint.is_here(one.name, at):
            return None
        elements = {
            key: blueprint.cut(one.name, whole, at.tensor) for key, whole in one.elements.items()
        }
        return WholeTensor(
            name=one.name,
            value=blueprint.cut(one.name, one.value, at.tensor),
            elements=elements,
            rest=one.rest,
        )

    def _lay_out_module(self, blueprint: Blueprint, at: Coordinate, mesh: GroupMesh | None) -> None:
        self._strip()
        if mesh is not None:
            assert blueprint.plan is not None
            parallelize(
                self.module, mesh, blueprint.plan, share=blueprint.share(at), dropout=self._dropout
            )
        named = named_tensors(self.module)
        missing = [
            named[name]
            for name in self.template.names
            if blueprint.is_here(name, at) and named[name].is_meta
        ]
        self._replace({id(tensor): empty_on(tensor, self._device) for tensor in missing})
        if self._checkpointed:
            checkpoint_activations(self.module, lambda part: part in self._checkpointed)

    def _strip(self) -> None:
        """Restores the user's module to its unsplit form, with its tensors on the meta device."""
        self.data_axis.release()
        self.hidden.release()
        self.hidden = HiddenParameters({}, self.whereabouts)
        for part in self._checkpointed:
            part.__dict__.pop("forward", None)
        unparallelize(self.module)
        self._put_meta()

    def _put_meta(self) -> None:
        """Replaces every tensor of the state with a meta tensor. Tied tensors remain tied."""
        fresh = {
            name: empty_on(tensor, torch.device("meta"))
            for name, tensor in self.template.tensors().items()
        }
        named = named_tensors(self.module)
        self._replace(
            {id(named[key]): fresh[first] for key, first in self.template.first_names.items()}
        )

    def _replace(self, by_id: Mapping[int, torch.Tensor]) -> None:
        for part in self.module.modules():
            places: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
            for tensors in places:
                for name, tensor in tensors.items():
                    if id(tensor) in by_id:
                        tensors[name] = by_id[id(tensor)]

    @torch.no_grad()
    def _own_pieces(self) -> None:
        named = named_tensors(self.module)
        self.pieces, self.parameters = {}, {}
        for name in self.template.names:
            parameter = named[name]
            if name not in self.template.parameter_names or parameter.is_meta:
                continue
            self.parameters[name] = parameter
            if isinstance(parameter, DTensor):
                self.pieces[name] = nn.Parameter(
                    parameter.to_local(), requires_grad=parameter.requires_grad
                )
            else:
                assert isinstance(parameter, nn.Parameter)
                self.pieces[name] = parameter
        self.data_axis = Replicated(self.pieces)

    def counts(self, name: str) -> bool:
        """Returns whether this rank includes a parameter's elements in sums over all elements
        (`Blueprint.counts`)."""
        assert self.blueprint is not None
        assert self.cut is not None
        return self.blueprint.counts(name, self.cut.at)

    # --------------------------------------------------------------------------------------- values

    @torch.no_grad()
    def _put_values(self, parts: Mapping[str, torch.Tensor]) -> None:
        named = named_tensors(self.module)
        for name in parts.keys() - self.pieces.keys():
            named[name].copy_(parts[name])
        self.data_axis.load(parts)

    @torch.no_grad()
    def _point_optimizer(self, state: State) -> None:
        if self.optimizer is not None:
            self.data_axis.use(
                self.optimizer, self._group_names, {name: own for name, own in state.items() if own}
            )

    def _shapes(self) -> dict[str, torch.Size | None]:
        tensors = self.template.tensors()
        beside: dict[str, torch.Size | None] = dict.fromkeys(self._beside)
        return {key: tensors[first].shape for key, first in self.template.keys.items()} | beside

    def _group_shapes(self) -> list[list[torch.Size]]:
        tensors = self.template.tensors()
        return [[tensors[name].shape for name in names] for names in self._group_names]

    @torch.no_grad()
    @override
    def load_values(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._check_values(tensors)
        self._before = []  # parts with the previous values
        key_of = {first: key for key, first in self.template.keys.items()}
        self._put_values(
            {
                name: self._own_part(name, tensors[key_of[name]])
                for name in self.template.names
                if self._is_here(name)
            }
        )
        self.load_beside(
            {key: value for key, value in tensors.items() if key not in self.template.keys}
        )

    @torch.no_grad()
    @override
    def load_optimizer(self, saved: Mapping[str, Any]) -> None:
        self._check_optimizer(saved)
        if self.optimizer is None:
            return
        self._before = []  # parts with the previous state
        tensors = self.template.tensors()
        state: dict[str, dict[str, Any]] = {}
        for group, names in zip(saved["param_groups"], self._group_names, strict=True):
            for number, name in zip(group["params"], names, strict=True):
                own = saved["state"].get(number)
                if own and name in self.pieces:
                    state[name] = {
                        key: self._own_state(name, key, value, tensors[name])
                        for key, value in own.items()
                    }
        self.settings = [
            {key: value for key, value in group.items() if key != "params"}
            for group in saved["param_groups"]
        ]
        self._point_optimizer(state)

    def _own_state(self, name: str, key: str, value: Any, whole: torch.Tensor) -> Any:
        value = as_made_by(self.optimizer, value, key, whole.dtype)
        if not isinstance(value, torch.Tensor):
            return value
        return (
            self._own_part(name, value).to(self._device)
            if is_element(value, key, whole.shape)
            else value.clone()
        )

    def _is_here(self, name: str) -> bool:
        return self.blueprint is None or (
            self.cut is not None and self.blueprint.is_here(name, self.cut.at)
        )

    def _own_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        if self.blueprint is None or self.cut is None:
            return whole.clone()
        return self.blueprint.cut(name, whole, self.cut.at.tensor)

    # --------------------------------------------------------------------------- the complete state

    @override
    def assemble(self, channel: Channel) -> dict[str, Any]:
        if self.is_unsharded or self.is_empty:
            optimizer = self.optimizer.state_dict() if self.optimizer is not None else None
            return {"model": self.values(channel), "optimizer": optimizer}
        return self._as_one_process(channel)

    def _as_one_process(self, channel: Channel) -> dict[str, Any]:
        wholes = {one.name: one for one in gather(channel, self.held(), self.blueprint_for)}
        model: dict[str, Any] = {
            key: wholes[first].value for key, first in self.template.keys.items()
        }
        model |= self.gather_beside(channel)
        if self.optimizer is None:
            return {"model": model, "optimizer": None}
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        number = 0
        for settings, names in zip(self.settings, self._group_names, strict=True):
            groups.append({**settings, "params": list(range(number, number + len(names)))})
            for name in names:
                own = {**wholes[name].elements, **wholes[name].rest}
                if own:
                    state[number] = own
                number += 1
        return {"model": model, "optimizer": {"state": state, "param_groups": groups}}

    def help_assemble(self, channel: Channel) -> None:
        """Sends this rank's part to the first rank, which calls `assemble` at the same time. Must
        be called on all other ranks. Needs memory for only a few unsplit tensors at a time."""
        if not self.is_unsharded and not self.is_empty:
            for _ in gather(channel, self.held(), self.blueprint_for):
                pass
            self.gather_beside(channel)

    def gather_beside(self, channel: Channel) -> dict[str, Any]:
        """Returns the module's extra state. That of each submodule comes from the first rank that
        runs the submodule. Must be called on all ranks of `channel`."""
        if not self._beside:
            return {}
        here = {key: value for key, value in other_entries(self.module).items() if self._runs(key)}
        structure, tensors = flatten(here)
        merged: dict[str, Any] = {}
        for received in channel.exchange(dump_tensors(tensors, {"structure": structure})):
            theirs, metadata = load_tensors(received)
            merged = unflatten(metadata["structure"], theirs) | merged
        return merged

    def _runs(self, key: str) -> bool:
        """Returns whether this rank runs the module that owns the extra-state entry `key`."""
        if self.cut is None or self.blueprint is None:
            return bool(self.pieces)
        return self.blueprint.share(self.cut.at).runs(key.rpartition(".")[0])

    def load_beside(self, values: Mapping[str, Any]) -> None:
        """Loads the module's extra state, as returned by `gather_beside`."""
        if values:
            load_captured(self.module, values)

    @override
    def values(self, channel: Channel) -> dict[str, Any]:
        if self.is_unsharded:
            return ModuleState(self.module).captured()
        if self.is_empty:  # a spare, whose answer is not used
            shapes = self.template.tensors()
            return {
                key: torch.zeros_like(shapes[first], device=self._device)
                for key, first in self.template.keys.items()
            }
        wholes = {
            one.name: one.value
            for one in gather(channel, self.held(), self.blueprint_for, state=False)
        }
        return {
            key: wholes[first] for key, first in self.template.keys.items()
        } | self.gather_beside(channel)

    def unsaved(self) -> dict[str, torch.Tensor]:
        """Returns the buffers that are not in any state dict. Every rank keeps them."""
        return unsaved_buffers(self.module)
