"""Turns the parameters of a module into the shards that a plan names. Threads: called on the rank's own, at the beginning of a run."""

from __future__ import annotations

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shoal_worker.tensor_parallel.plan import ParameterLayout


class Distributor:
    """Splits parameters one at a time: beside the shards, a rank holds one whole parameter at most.

    A parameter that several modules share stays one.
    """

    def __init__(self, mesh: DeviceMesh, *, source_rank: int | None, device: torch.device) -> None:
        """`source_rank`: whose values win, within the mesh; the others' may be on `meta`. None: all ranks have the same values."""
        self._mesh = mesh
        self._source_rank = source_rank
        self._device = device
        self._made: dict[int, nn.Parameter] = {}
        self.replaced: list[tuple[nn.Parameter, nn.Parameter]] = []
        """Old and new, for those that became other objects. The old ones are empty."""

    def distribute(self, module: nn.Module, attribute: str, layout: ParameterLayout) -> None:
        old = module._parameters[attribute]
        assert old is not None
        new = self._made.get(id(old))
        if new is None:
            values = self.values(layout.name, old.detach())
            if layout.dimension is None:
                new = old if values is old.detach() or values.data_ptr() == old.data_ptr() else nn.Parameter(values, old.requires_grad)
            else:
                new = nn.Parameter(shard(values, layout, self._mesh))
                keep_gradients_placed(new)
                new.requires_grad_(old.requires_grad)
            self._made[id(old)] = self._made[id(new)] = new
            if new is not old:
                self.replaced.append((old, new))
                old.data = old.data.new_empty(0)  # an optimizer may hold it for long
        module.register_parameter(attribute, new)

    def values(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The source's values, whole, on the device; in place where they can be."""
        if self._source_rank is None or self._mesh.get_local_rank() == self._source_rank:
            if tensor.is_meta:
                raise ConfigurationError(
                    f"tensor parallelism: {name} is on the meta device on rank {self._mesh.get_local_rank()}, whose values count;"
                    " give it values there (to_empty and initialize, or load a checkpoint)"
                )
            tensor = tensor.to(self._device)
        elif tensor.is_meta or tensor.device != self._device:
            tensor = torch.empty_like(tensor, device=self._device)
        if self._source_rank is not None:
            whole = tensor.contiguous()
            dist.broadcast(whole, group=self._mesh.get_group(), group_src=self._source_rank)
            if whole is not tensor:
                tensor.copy_(whole)
        return tensor


def shard(whole: torch.Tensor, layout: ParameterLayout, mesh: DeviceMesh) -> DTensor:
    """This rank's part of a whole parameter (or of an optimizer's state of its shape), as a DTensor of the stored shape.

    Cut as DTensor cuts: pieces of the same size, rounded up, the last one smaller.
    """
    assert layout.dimension is not None
    stored = whole.reshape(layout.stored_shape)
    length = stored.shape[layout.dimension]
    piece = -(-length // mesh.size())
    begin = min(mesh.get_local_rank() * piece, length)
    local = stored.narrow(layout.dimension, begin, min(piece, length - begin)).clone(memory_format=torch.contiguous_format)
    meta = torch.empty(layout.stored_shape, device="meta")
    return DTensor.from_local(local, mesh, [Shard(layout.dimension)], run_check=False, shape=meta.shape, stride=meta.stride())


def keep_gradients_placed(parameter: nn.Parameter) -> None:
    """A gradient that comes as a sum yet to be made, or whole, is brought to the parameter's own layout before it is added up."""
    placements = parameter.placements  # type: ignore[attr-defined]

    def placed(gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(gradient, DTensor) and gradient.placements != placements:
            return gradient.redistribute(placements=placements)
        return gradient

    parameter.register_hook(placed)
