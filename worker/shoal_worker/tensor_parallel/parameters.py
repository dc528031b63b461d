"""Turns the parameters of a module into the shards that a plan names. Threads: called on the rank's own, at the beginning of a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
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
    """Gives the parameters of this rank's share memory for their parts. A parameter that several modules share stays one."""

    def __init__(self, mesh: DeviceMesh, share: Share, device: torch.device) -> None:
        self.share = share
        self._mesh = mesh
        self._device = device
        self._made: dict[int, nn.Parameter] = {}
        """The parameters made so far, by the id of the one that each replaced and by their own: a tied one is met again under either."""

    def distribute(self, module: nn.Module, attribute: str, layout: ParameterLayout) -> None:
        """Puts this rank's part of a parameter in its place, with any values in it."""
        old = module._parameters[attribute]
        assert old is not None
        new = self._made.get(id(old))
        if new is None:
            new = self._part(old, layout) if layout.name in self.share.parameters else old
            self._made[id(old)] = self._made[id(new)] = new
        module.register_parameter(attribute, new)

    def _part(self, old: nn.Parameter, layout: ParameterLayout) -> nn.Parameter:
        if layout.dimension is None:
            return nn.Parameter(torch.empty_like(old, device=self._device), old.requires_grad)
        shape = cut_shape(layout, self._mesh.size(), self._mesh.get_local_rank())
        new = nn.Parameter(_distributed(torch.empty(shape, dtype=old.dtype, device=self._device), layout, self._mesh))
        _keep_gradients_placed(new)
        new.requires_grad_(old.requires_grad)
        return new


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


def _distributed(local: torch.Tensor, layout: ParameterLayout, mesh: DeviceMesh) -> DTensor:
    assert layout.dimension is not None
    meta = torch.empty(layout.stored_shape, device="meta")
    return DTensor.from_local(local, mesh, [Shard(layout.dimension)], run_check=False, shape=meta.shape, stride=meta.stride())


def _keep_gradients_placed(parameter: nn.Parameter) -> None:
    """A gradient that comes as a sum yet to be made, or whole, is brought to the parameter's own layout before it is added up."""
    placements = parameter.placements  # type: ignore[attr-defined]  # set where it was cut

    def placed(gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(gradient, DTensor) and gradient.placements != placements:
            return gradient.redistribute(placements=placements)
        return gradient

    parameter.register_hook(placed)
