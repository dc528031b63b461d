"""A model of which several ranks hold one replica together: what there is to do with it between steps.

How it is divided, put together, saved, loaded and copied. How it is trained is in `mesh.py`. All of it runs on the training thread.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from shoal_common.errors import ConfigurationError, MembershipChanged, PreconditionError
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from shoal_worker.elastic.consistency import digest_of, state_tensors
from shoal_worker.elastic.group import Channel
from shoal_worker.engine.closing import Closing
from shoal_worker.engine.elsewhere import refuse_loading
from shoal_worker.mesh.axes import Axes
from shoal_worker.mesh.blueprint import Blueprint, Template, meta_copy
from shoal_worker.mesh.division import Division, Sharding
from shoal_worker.mesh.gradients import MeshGradients
from shoal_worker.mesh.parts import ModelParts
from shoal_worker.pipelining.pipeline import PipelineSettings
from shoal_worker.strategies.base import call_module
from shoal_worker.strategies.in_parts import ModelInParts
from shoal_worker.tensor_parallel.context import DropoutRandomness

TENSOR_OPTIONS: Final = frozenset({"plan", "sequence_dimension", "loss_parallel", "example_inputs", "dropout", "elementwise_optimizer"})
PIPELINE_OPTIONS: Final = frozenset({"schedule", "micro_batches", "stages_per_rank", "cut_points"})
"""Keyword arguments of `as_distributed`."""


class DividedModel(ModelInParts[ModelParts, Closing]):
    """A model that several ranks hold together."""

    def axes_for(self, world_size: int) -> Axes:
        """How so many ranks are divided. Those that no replica can be made of are spares.

        Raises:
            ConfigurationError: the model cannot be cut so.
        """
        raise NotImplementedError

    @property
    def pipelined(self) -> bool:
        """The model is run as a pipeline."""
        raise NotImplementedError

    @property
    def sharding(self) -> Sharding | None:
        """What is cut along the data axis."""
        return None

    def _prepare(self) -> None:
        if any(is_lazy(t) for t in (*self.module.parameters(), *self.module.buffers())):
            raise ConfigurationError("the model has lazy parameters without a shape: run one batch through it before as_distributed")
        if self.config.deterministic:
            raise ConfigurationError(
                f"deterministic=True with strategy={self.strategy!r}: how a model is split changes the order of its own sums, so results "
                "cannot be bitwise those of another number of ranks; leave it out, or take ddp, zero1, zero2, zero3 or fsdp"
            )
        own = self._options
        checkpointed = {name: part for name, part in self.module.named_modules() if "forward" in part.__dict__}
        forwards = [part.__dict__.pop("forward") for part in checkpointed.values()]
        template = meta_copy(self.module)
        for part, forward in zip(checkpointed.values(), forwards, strict=True):
            part.__dict__["forward"] = forward
        self._checkpointed = tuple(checkpointed)
        """Names of modules whose activations are computed again: their forward passes stand in them, not in their classes."""
        self._template = Template(
            module=template,
            plan_options={
                "minimum_parameter_group_size": self.config.minimum_parameter_group_size,
                **{name: own[name] for name in ("plan", "sequence_dimension", "loss_parallel", "example_inputs") if name in own},
            },
            pipeline=PipelineSettings(
                loss_reduction="mean" if self.config.loss_reduction == "mean" else "sum",
                **{name: own[name] for name in PIPELINE_OPTIONS if name in own},
            ),
            pipelined=self.pipelined,
        )
        dropout = own.get("dropout", DropoutRandomness.PER_SHARD)
        if dropout not in list(DropoutRandomness):
            raise ConfigurationError(f"dropout={dropout!r}: expected one of {', '.join(DropoutRandomness)}")
        self._dropout = DropoutRandomness(dropout)
        self._division: Division | None = None
        """None until the first step, in a spare, and where laying it out has failed."""
        self._in_passes = False
        """Between a forward pass and its backward pass."""
        self._standing_in: list[nn.Module] = []
        """One at most. In a list, or it would be a part of this module."""
        self._axes: dict[int, Axes] = {}

    def _make_state(self) -> ModelParts:
        refuse_loading(self.module)
        return ModelParts(
            self.module,
            self._template,
            self._session.device,
            dropout=self._dropout,
            checkpointed=self._checkpointed,
            whereabouts=self._whereabouts,
        )

    @property
    def _divided(self) -> Division:
        if self._division is None:
            raise PreconditionError("the model is not laid out over the ranks: that happens when the first step begins")
        return self._division

    @property
    def _gradients(self) -> MeshGradients:
        return self._divided.gradients

    def _own_pieces(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._held.along_data.own.items()

    def _trained(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        for name, piece in self._held.pieces.items():
            yield name, piece, self._held.is_trained(name)

    def _parameter_names(self) -> dict[str, str]:
        template = self._template
        return {name: first for name, first in template.first_names.items() if first in template.parameter_names}

    def _commit_buffers(self) -> None:
        if self._division is not None:
            self._division.buffers.commit()

    def _check_divisible(self) -> None:
        axes, world = self._divide(self._session.world_size), self._session.world_size
        self._held.blueprint_for(axes)
        membership = self._session.membership
        if axes.working < world and (membership is None or membership.only_backend is not None):
            raise ConfigurationError(
                f"{world} ranks make {axes.data} replica(s) of pipeline {axes.pipeline} x tensor {axes.tensor} = {axes.replica_size}, and "
                f"{world - axes.working} would be left over for good: start a multiple of {axes.replica_size}"
            )
        if axes.data == 0:
            raise ConfigurationError(
                f"{world} rank(s) are fewer than the {axes.replica_size} that hold one replica (pipeline {axes.pipeline} x tensor "
                f"{axes.tensor}): let the job begin with {axes.replica_size} at least (--nproc-per-node, MIN of --nnodes MIN:MAX)"
            )

    def _most_cut(self, candidates: Iterable[Axes]) -> Axes:
        """The first that is possible. Given from the largest size down, the answer never holds more of the model on a rank because ranks
        have come; those that this leaves over are spares."""
        for axes in candidates:
            with contextlib.suppress(ConfigurationError):
                Blueprint(self._template, axes)
                return axes
        raise ConfigurationError("no rank is left to hold the model")

    def _divide(self, world_size: int) -> Axes:
        if world_size not in self._axes:
            self._axes[world_size] = self.axes_for(world_size)
        return self._axes[world_size]

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """See `ShardedModel`. All ranks of a replica call it, with the same inputs, and get the same outputs."""
        if self._ahead:
            return call_module(self._stand_in().eval(), inputs)
        with self._passing():
            if self._pipeline_here:
                return self._through_pipeline(inputs)
            return pytree.tree_map_only(DTensor, DTensor.full_tensor, super().predict(inputs))

    @contextlib.contextmanager
    def _passing(self) -> Iterator[None]:
        """While open, the module computes: nothing of its parameters is hidden."""
        if self._parts is None or self._in_passes:
            yield
            return
        self._parts.hidden.show()
        try:
            yield
        finally:
            self._parts.hidden.hide()

    @property
    def _ahead(self) -> bool:
        """This process's script is not where its peers' are, and the model is laid out over them: they would not answer. Or a failure has
        left it laid out over nobody, and the step is lost."""
        return self.in_parts and (self._session.is_joining or self._division is None)

    def _stand_in(self) -> nn.Module:
        """What such a script computes with: nobody uses the answer. The module itself where it is whole."""
        if not self.in_parts:
            return self.module
        if not self._standing_in:
            tensors = self._template.tensors()
            noughts = {key: torch.zeros(tensors[first].shape) for key, first in self._template.first_names.items()}
            self._standing_in.append(self._whole_module(noughts))
        return self._standing_in[0].train(self.module.training)

    @property
    def _pipeline_here(self) -> bool:
        return self._division is not None and self._division.pipeline is not None and self.module is self._held.module

    def _through_pipeline(self, inputs: Any) -> Any:
        """In a step a failure is that of the step: nothing is raised into the user's loop, and the outputs are none that count. In an
        operation between steps it is raised, and the operation done again."""
        try:
            return self._divided.predict(inputs)
        except MembershipChanged as error:
            if self._session.step is None:
                raise
            self._session.mark_lost(error)
            return call_module(self._stand_in(), inputs)

    @property
    def in_parts(self) -> bool:
        """See `Replica`."""
        return self._parts is not None and not self._parts.is_whole

    @property
    def idle(self) -> bool:
        """This rank is a spare: no whole replica could be made with it."""
        return self._parts is not None and self._parts.is_empty

    @property
    def lacks_ranks(self) -> bool:
        """See `Replica`."""
        return self._parts is not None and self._parts.is_whole and self._too_few(self._session.world_size)

    def _too_few(self, world_size: int) -> bool:
        """Whether so many ranks are fewer than one replica of the model takes."""
        return self._divide(world_size).data == 0

    # ---------------------------------------------------------------------------------------------------------------- ranks

    @property
    def data_parallel_rank(self) -> int:
        """Which replica of the model this rank belongs to; 0 in a spare."""
        at = self._divide(self._session.world_size).at(self._session.rank)
        return at.data if at is not None else 0

    @property
    def speaks(self) -> bool:
        """See `Replica`."""
        at = self._divide(self._session.world_size).at(self._session.rank)
        return at is not None and at.pipeline == at.tensor == 0

    @property
    def replica_size(self) -> int:
        """See `Replica`."""
        return self._divide(self._session.world_size).replica_size

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas."""
        return max(1, self._divide(self._session.world_size).data)

    # ---------------------------------------------------------------------------------------------------------------- state

    @torch.no_grad()
    def assemble(self, channel: Channel) -> dict[str, Any]:
        """See `Replica`."""
        if channel.rank != 0:
            self._held.help_assemble(channel)
            return {}
        unsaved = self._held.unsaved()
        whole = self._held.assemble(channel)
        return whole | {"buffers": unsaved} if unsaved else whole

    def in_common(self) -> Mapping[str, int]:
        """See `Replica`: this rank's part, with the other replicas' ranks that hold the same."""
        division, held = self._division, self._held
        if division is None:
            return {}
        at = division.cut.at
        digests = {}
        for position, runs in held.along_data.runs(held.optimizer).items():
            tensors = [[run.value, *state_tensors({name: run.state}, [name])] for name, run in sorted(runs.items())]
            digests[f"part {at.pipeline}.{at.tensor}, shard {position}"] = digest_of(tensor for each in tensors for tensor in each)
        return digests

    @contextlib.contextmanager
    def whole_for(self, channel: Channel) -> Iterator[None]:
        """See `ShardedModel`. The whole model has to fit on each rank beside its part."""
        if self._parts is None or not self.in_parts:
            yield
            return
        whole, own = self._whole_module(self._held.values(channel)), self.module
        for part, original in zip(whole.modules(), own.modules(), strict=True):
            part.training = original.training
        self.module = whole
        try:
            yield
        finally:
            self.module = own

    def _whole_module(self, values: Mapping[str, torch.Tensor]) -> nn.Module:
        """The module as the user wrote it, with these values."""
        whole = copy.deepcopy(self._template.module).to_empty(device=self._session.device)
        for first, second in self._template.first_names.items():  # to_empty makes tied ones several
            owner, _, name = first.rpartition(".")
            source, _, own = second.rpartition(".")
            if first != second and first in self._template.tied_parameters:
                setattr(whole.get_submodule(owner), name, whole.get_submodule(source)._parameters[own])
        whole.load_state_dict(values)
        buffers = dict(whole.named_buffers())
        for name, value in self._held.unsaved().items():
            buffers[name].copy_(value)
        return whole

    def clone(self) -> nn.Module:
        """A copy of the whole model as it is now, a plain module as the user wrote it, to keep, evaluate or save. Every rank calls it."""
        return self._whole_module(self.full_state_dict())

    def _whole_parameters(self) -> list[tuple[torch.Tensor, torch.Size]]:
        tensors = self._template.tensors()
        return [(tensors[name], tensors[name].shape) for name in self._template.names if name in self._template.parameter_names]
