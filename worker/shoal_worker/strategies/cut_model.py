"""A model whose parameters and optimizer state are in a `CutState`: what there is to do with it between steps.

How it is built, put together, saved, loaded and copied. How it is trained is in `sharded.py`. All of it runs on the training thread, on
every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from shoal_common.errors import ConfigurationError
from torch.utils import _pytree as pytree

from shoal_worker.elastic.group import Channel
from shoal_worker.engine.buffers import CommittedBuffers
from shoal_worker.engine.closing import CutClosing
from shoal_worker.engine.compressed import check_floating, compression_of
from shoal_worker.engine.elsewhere import refuse_loading
from shoal_worker.engine.parameter_groups import ParameterGroup, alike
from shoal_worker.sharding.collectives import SessionCollectives
from shoal_worker.sharding.compressing import CompressedScatter
from shoal_worker.sharding.cut_state import CutState
from shoal_worker.sharding.division import Division, among_all
from shoal_worker.sharding.execution import ShardedExecution
from shoal_worker.sharding.gradients import CutGradients
from shoal_worker.sharding.homes import home_of
from shoal_worker.sharding.unit import Stage, Unit
from shoal_worker.state.part import StatePart
from shoal_worker.strategies.in_parts import ModelInParts


class CutModel(ModelInParts[CutState, CutClosing]):
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
        super().initialize_sharding()

    def _prepare(self) -> None:
        compressor = self.config.compressor
        if compressor is not None and not compressor.codec:
            raise ConfigurationError(
                f"gradient_compression={compressor.name!r} with strategy={self.strategy!r}: it needs whole matrices on every rank, and "
                "gradients are cut here; take topk, int8 or another, or ddp"
            )
        self._compression = compression_of(compressor, self._session)
        self._collectives = self.collectives()

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
            whereabouts=self._whereabouts,
        )

    def _make_state(self) -> CutState:
        units = [(group.module, [self._unit(part) for part in alike(group)]) for group in self.groups()]
        self._execution = ShardedExecution(units, self._collectives, self.stage, self._whereabouts)
        state = CutState(self.module, self._execution, self.stage, self.divide)
        if any(unit.apart for unit in state.units):
            refuse_loading(self.module)
        if self._compression is not None:
            for number, unit in enumerate(state.trained):
                check_floating(self._compression.compressor.name, unit.parameters)
                unit.compressed = CompressedScatter(self._compression, self._session, number)
        self._summed = CutGradients(state.trained, exact=self.config.deterministic)
        self._step_buffers = CommittedBuffers(self.module)
        return state

    @property
    def _gradients(self) -> CutGradients:
        return self._summed

    def _own_pieces(self) -> list[tuple[str, torch.Tensor]]:
        return [each for unit in self._held.units for each in zip(unit.parameter_names, unit.own.pieces, strict=True)]

    def _trained(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        for unit in self._held.units:
            for name, parameter in zip(unit.parameter_names, unit.parameters, strict=True):
                yield name, parameter, unit.trained

    def _check_training(self) -> None:
        super()._check_training()
        moved = next(filter(None, (unit.moved for unit in self._held.units)), None)
        if moved is not None:
            raise ConfigurationError(
                f"parameter {moved!r} was given other memory or another dtype after as_distributed (by module.half() or p.data = ..., "
                f"say): with strategy={self.strategy!r} it would be trained no more; convert the module before as_distributed, and set "
                "values with model.with_parameters(values)"
            )

    def _parameter_names(self) -> dict[str, str]:
        first = {id(p): name for name, p in self.module.named_parameters()}
        return {name: first[id(p)] for name, p in self.module.named_parameters(remove_duplicate=False)}

    def _commit_buffers(self) -> None:
        self._step_buffers.commit()

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

    def in_common(self) -> Mapping[str, int]:
        """See `Replica`: shards with the ranks that mirror them, and what is whole on every rank."""
        return self._held.in_common() if self._parts is not None and not self._parts.whole else {}

    @torch.no_grad()
    def bring_together(self, channel: Channel) -> None:
        """See `Replica`: parameters that are whole on every rank were updated on their owners, and perhaps not fetched; and some ranks may
        have begun the first step, others not."""
        if self._parts is not None:
            self._parts.make_whole_again(channel)
            self._parts.fill(channel)

    @torch.no_grad()
    def keep_two_copies(self, channel: Channel, leaving: Collection[int] = ()) -> None:
        """See `Replica`."""
        if self._parts is not None:
            self._parts.copy_singles(channel, leaving)

    def whole_for(self, channel: Channel) -> AbstractContextManager[None]:
        """See `ShardedModel`."""
        return self._held.whole_for(channel) if self._parts is not None else nullcontext()

    @property
    def in_parts(self) -> bool:
        """See `Replica`."""
        return self._parts is not None and self._parts.cut is not None and self._parts.cut.world_size > 1

    @property
    def holds(self) -> list[str]:
        """See `Replica`: shards, the one that it mirrors among them."""
        cut = self._parts.cut if self._parts is not None and self.in_parts else None
        return [str(position) for position in (cut.position, cut.mirrored) if position is not None] if cut is not None else []

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


def in_dtype(inputs: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors within `inputs`, converted."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, inputs)
