"""A model whose parameters and optimizer state are in a `CutState`: what there is to do with it between steps.

How it is built, put together, saved, loaded and copied. How it is trained is in `sharded.py`. All of it runs on the training thread, on
every rank alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from torch.utils import _pytree as pytree

from shoal_worker.elastic.group import Channel
from shoal_worker.sharding.collectives import SessionCollectives
from shoal_worker.sharding.compressing import CompressedScatter
from shoal_worker.sharding.cut_state import CutState
from shoal_worker.sharding.division import Division, among_all
from shoal_worker.sharding.execution import ShardedExecution
from shoal_worker.sharding.gradients import CutGradients
from shoal_worker.sharding.homes import home_of
from shoal_worker.sharding.partition import Group as ParameterGroup
from shoal_worker.sharding.partition import alike
from shoal_worker.sharding.unit import Stage, Unit
from shoal_worker.state.part import StatePart
from shoal_worker.strategies.base import ShardedModel, replaced_parameters
from shoal_worker.strategies.buffers import CommittedBuffers
from shoal_worker.strategies.compressed import check_floating, compression_of
from shoal_worker.strategies.materialize import has_values


class CutModel(ShardedModel):
    """A model whose optimizer state, and perhaps parameters, are cut over the ranks."""

    stage: ClassVar[Stage]
    options: ClassVar[frozenset[str]] = frozenset({"elementwise_optimizer"})
    compresses: ClassVar[bool] = True
    settings: ClassVar[frozenset[str]] = frozenset({"param_dtype", "reduce_dtype", "offload"})

    def groups(self) -> list[ParameterGroup]:
        """What is gathered and reduced at once, the group of the outermost module first."""
        raise NotImplementedError

    def collectives(self) -> SessionCollectives:
        """What it communicates by."""
        return SessionCollectives(self._session)

    def divide(self, hosts: Sequence[str]) -> Division:
        """How ranks on these hosts divide the model."""
        return among_all(hosts)

    def initialize_sharding(self) -> None:
        """Takes over the memory of the parameters. They are cut when the first step begins: until then all ranks hold them whole."""
        # What torch.compile gave is called, but state is named as in the user's own module.
        self._call: Callable[..., Any] = self.module.__call__
        self.module = getattr(self.module, "_orig_mod", self.module)
        if not any(p.requires_grad for p in self.module.parameters()):
            raise ConfigurationError("the model has no parameter with requires_grad=True: there is nothing to train")
        compressor = self.config.compressor
        if compressor is not None and not compressor.codec:
            raise ConfigurationError(
                f"gradient_compression={compressor.name!r} with strategy={self.strategy!r}: it needs whole matrices on every rank, and "
                "gradients are cut here; take topk, int8 or another, or ddp"
            )
        self._compression = compression_of(compressor, self._session)
        self._collectives = self.collectives()
        self._optimizer: torch.optim.Optimizer | None = None
        """The user's, until it is used."""
        self._parts: CutState | None = None
        """None while the module is on the meta device: it is built when values come."""
        if has_values(self.module):
            self._build()

    def _unit(self, part: ParameterGroup) -> Unit:
        config = self.config
        return Unit(
            part.name,
            part.parameters,
            part.names,
            stage=self.stage,
            wide=config.deterministic,
            param_dtype=config.param_dtype,
            reduce_dtype=config.reduce_dtype,
            home=home_of(config.offload, part.parameters[0].device),
        )

    def _build(self) -> None:
        units = [(group.module, [self._unit(part) for part in alike(group)]) for group in self.groups()]
        self._execution = ShardedExecution(units, self._collectives, self.stage)
        self._parts = CutState(self.module, self._execution, self.stage, self.divide)
        if self._compression is not None:
            for number, unit in enumerate(self._parts.trained):
                check_floating(self._compression.compressor.name, unit.parameters)
                unit.compressed = CompressedScatter(self._compression, self._session, number)
        self._gradients = CutGradients(self._parts.trained, exact=self.config.deterministic)
        self._step_buffers = CommittedBuffers(self.module)

    def _use_optimizer(self) -> None:
        if self._optimizer is not None:
            self._held.use_optimizer(self._optimizer, elementwise=bool(self._options.get("elementwise_optimizer", False)))

    @property
    def _held(self) -> CutState:
        if self._parts is None:
            raise PreconditionError("the model is on the meta device: it gets its values from its peers at the first live batch")
        return self._parts

    @torch.no_grad()
    def assemble(self, channel: Channel) -> dict[str, Any]:
        """See `Replica`: with what compression left behind on each rank."""
        whole = self._held.assemble(channel)
        return whole if self._compression is None else whole | {"compression": self._compression.assemble(channel)}

    @torch.no_grad()
    def part(self, channel: Channel) -> StatePart | None:
        """See `Replica`."""
        part = self._held.part(channel)
        return part if part is None or self._compression is None else self._compression.part(part, channel)

    def whole_for(self, channel: Channel) -> AbstractContextManager[None]:
        """See `ShardedModel`."""
        return self._held.whole_for(channel) if self._parts is not None else nullcontext()

    @property
    def in_parts(self) -> bool:
        """See `Replica`."""
        return self._parts is not None and self._parts.cut is not None and self._parts.cut.world_size > 1

    def has_values(self) -> bool:
        """See `Replica`."""
        return self._parts is not None

    # ---------------------------------------------------------------------------------------------------------------- state

    def gather_full_parameters(self) -> dict[str, torch.Tensor]:
        """See `ShardedModel`. Every rank calls it."""
        parameters = {name for name, _ in self.module.named_parameters()}
        return {name: value for name, value in self.full_state_dict().items() if name in parameters}

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """See `ShardedModel`. Every rank calls it."""
        whole: dict[str, torch.Tensor] = {}

        def body(channel: Channel) -> None:
            values = self._held.values(channel)
            whole.clear()
            if not rank0_only or channel.rank == 0:
                whole.update({name: value.detach().clone() for name, value in values.items()})
            channel.exchange(b"")  # who comes out of this knows that all have theirs

        self._session.operation("full_state_dict", body)
        return whole

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's whole state. Every rank calls it."""
        whole: dict[str, Any] = {}

        def body(channel: Channel) -> None:
            whole.update(copy.deepcopy(self._held.assemble(channel)["optimizer"]))
            channel.exchange(b"")

        self._session.operation("optimizer state_dict", body)
        return whole

    @torch.no_grad()
    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the optimizer's whole state. Every rank calls it."""
        self._held.load_optimizer(state)

    @torch.no_grad()
    def load_full(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `ShardedModel`."""
        self._held.load_values(tensors)
        self._step_buffers.commit()

    @property
    def local_shard(self) -> dict[str, torch.Tensor]:
        """See `ShardedModel`: flat pieces."""
        return {name: piece.detach() for name, piece in self._own_pieces()}

    def get_gradients(self) -> dict[str, torch.Tensor]:
        """See `ShardedModel`: of the flat pieces of `local_shard`, summed over the ranks."""
        return {name: piece.grad for name, piece in self._own_pieces() if piece.grad is not None}

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Refused: other ranks mirror this rank's pieces, and would apply other gradients.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(f"set_gradients: with strategy {self.strategy!r} other ranks hold mirrors; scale the loss, or use ddp")

    def save_model(self, path: str | Path) -> None:
        """See `ShardedModel`. When it returns on any rank, the file is in place."""
        super().save_model(path)
        self._session.operation("save_model", lambda channel: channel.exchange(b"") and None)

    def with_parameters(self, parameters: torch.Tensor | Mapping[str, torch.Tensor]) -> ShardedModel:
        """See `ShardedModel`. Every rank calls it, with the same values."""
        whole = self.full_state_dict()
        own = {name: whole[name] for name, _ in self.module.named_parameters()}
        replaced = self.agreed("with_parameters", lambda: replaced_parameters(parameters, own))
        shared = {id(p): name for name, p in self.module.named_parameters()}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            whole[name] = replaced.get(shared[id(parameter)], whole[name])
        self.load_full(whole)
        return self

    def get_model_metadata(self) -> dict[str, Any]:
        """See `ShardedModel`; with the layout: what is cut, into how many shards, how many ranks own each, and whether others mirror it."""
        division = self._parts.division if self._parts is not None else Division(world_size=1, shards=1)
        return super().get_model_metadata() | {
            "layout": {
                "sharded": [stage.name.lower() for stage in Stage if stage <= self.stage],
                "shards": division.shards,
                "replicas": division.replicas,
                "mirrored": division.mirrors,
            }
        }

    def _whole_parameters(self) -> list[tuple[torch.Tensor, torch.Size]]:
        return [each for unit in self._held.units for each in zip(unit.own.pieces, unit.layout.shapes, strict=True)]

    def _own_pieces(self) -> list[tuple[str, torch.Tensor]]:
        return [each for unit in self._held.units for each in zip(unit.parameter_names, unit.own.pieces, strict=True)]


def in_dtype(inputs: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors within `inputs`, converted."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, inputs)
