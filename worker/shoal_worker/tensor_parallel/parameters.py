"""Turns the parameters of a module into the shards that a plan names. Threads: called on the rank's own, at the beginning of a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shoal_worker.tensor_parallel.plan import ParameterLayout


@dataclass(frozen=True, kw_only=True)
class Share:
    """What of a model is on this rank, where it is cut in another way too: into pipeline stages."""

    parameters: frozenset[str]
    """By all their names. They get memory, with any values in it; others stay on `meta`."""
    elsewhere: tuple[str, ...]
    """Modules that other ranks run, with all that they contain: they stay as they are."""

    def runs(self, module: str) -> bool:
        """Whether this rank runs a module, or something that it contains."""
        return not any(module == other or module.startswith(f"{other}.") for other in self.elsewhere)


class Distributor:
    """Splits parameters one at a time: beside the shards, a rank holds one whole parameter at most.

    A parameter that several modules share stays one.
    """

    def __init__(self, mesh: DeviceMesh, *, source_rank: int | None, device: torch.device, share: Share | None = None) -> None:
        """`source_rank`: whose values win, within the mesh; the others' may be on `meta`. None: all ranks have the same values.
        `share`: see `parallelize`."""
        self._mesh = mesh
        self._share = share
        self._source_rank = source_rank
        self._device = device
        self._made: dict[int, nn.Parameter] = {}
        self.replaced: list[tuple[nn.Parameter, nn.Parameter]] = []
        """Old and new, for those that became other objects. The old ones are empty."""

    def distribute(self, module: nn.Module, attribute: str, layout: ParameterLayout) -> None:
        old = module._parameters[attribute]
        assert old is not None
        new = self._made.get(id(old))
        if new is None and self._share is not None:
            new = self._made[id(old)] = self._allocated(old, layout) if layout.name in self._share.parameters else old
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

    def _allocated(self, old: nn.Parameter, layout: ParameterLayout) -> nn.Parameter:
        """Memory for this rank's part, with any values in it."""
        if layout.dimension is None:
            return nn.Parameter(torch.empty_like(old, device=self._device), old.requires_grad)
        shape = cut_shape(layout, self._mesh.size(), self._mesh.get_local_rank())
        new = nn.Parameter(_distributed(torch.empty(shape, dtype=old.dtype, device=self._device), layout, self._mesh))
        keep_gradients_placed(new)
        new.requires_grad_(old.requires_grad)
        return new

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


def cut(whole: torch.Tensor, layout: ParameterLayout, size: int, part: int) -> torch.Tensor:
    """The part that rank `part` of `size` holds of a whole tensor; a copy. Pieces are of one size, rounded up, the last one smaller."""
    assert layout.dimension is not None
    begin, length = _range(layout, size, part)
    return whole.reshape(layout.stored_shape).narrow(layout.dimension, begin, length).clone(memory_format=torch.contiguous_format)


def cut_shape(layout: ParameterLayout, size: int, part: int) -> torch.Size:
    """The shape of `cut`."""
    assert layout.dimension is not None
    shape = list(layout.stored_shape)
    shape[layout.dimension] = _range(layout, size, part)[1]
    return torch.Size(shape)


def _range(layout: ParameterLayout, size: int, part: int) -> tuple[int, int]:
    """Where it begins, and how long it is. As DTensor cuts."""
    assert layout.dimension is not None
    length = layout.stored_shape[layout.dimension]
    piece = -(-length // size)
    begin = min(part * piece, length)
    return begin, min(piece, length - begin)


def shard(whole: torch.Tensor, layout: ParameterLayout, mesh: DeviceMesh) -> DTensor:
    """This rank's part of a whole parameter (or of an optimizer's state of its shape), as a DTensor of the stored shape."""
    return _distributed(cut(whole, layout, mesh.size(), mesh.get_local_rank()), layout, mesh)


def _distributed(local: torch.Tensor, layout: ParameterLayout, mesh: DeviceMesh) -> DTensor:
    assert layout.dimension is not None
    meta = torch.empty(layout.stored_shape, device="meta")
    return DTensor.from_local(local, mesh, [Shard(layout.dimension)], run_check=False, shape=meta.shape, stride=meta.stride())


def keep_gradients_placed(parameter: nn.Parameter) -> None:
    """A gradient that comes as a sum yet to be made, or whole, is brought to the parameter's own layout before it is added up."""
    placements = parameter.placements  # type: ignore[attr-defined]  # set where it was cut

    def placed(gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(gradient, DTensor) and gradient.placements != placements:
            return gradient.redistribute(placements=placements)
        return gradient

    parameter.register_hook(placed)
