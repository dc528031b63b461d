"""The state of a tensor-parallel model under the names and shapes of the model that the user wrote.

Between the two forms: `full_state_dict` and `load_full_state_dict` for the whole model, `gather` and `split` for one tensor that is laid
out as a parameter is, such as an optimizer's moments. A gathered state loads into any number of ranks, and into the plain model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shoal_worker.tensor_parallel.parameters import shard
from shoal_worker.tensor_parallel.plan import ParameterLayout, TensorParallelPlan


class TensorParallelState:
    """A model that `parallelize` has laid out, with what is needed to read and write it whole."""

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, plan: TensorParallelPlan, replaced: Sequence[tuple[nn.Parameter, nn.Parameter]]
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.plan = plan
        self.replaced = replaced
        """Each parameter that became another object: the old one, now empty, and the new one. For an optimizer made before: `repoint`."""
        self._layouts: dict[str, ParameterLayout] = {}
        by_name = {layout.name: layout for layout in plan.parameters}
        first: dict[int, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._layouts[name] = by_name[first.setdefault(id(parameter), name)]

    def repoint(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes an optimizer, which was made from the model before it was laid out and has not stepped yet, hold the new parameters.

        Raises:
            ConfigurationError: the optimizer has state already.
        """
        if optimizer.state:
            raise ConfigurationError(
                "the optimizer has stepped before its model was made tensor-parallel; make it anew, or load its state afterwards"
            )
        new = {id(old): parameter for old, parameter in self.replaced}
        for group in optimizer.param_groups:
            group["params"] = [new.get(id(parameter), parameter) for parameter in group["params"]]

    def gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor that is laid out like the parameter `name`, in that one's original shape. Collective over the mesh."""
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        return tensor.full_tensor().detach().reshape(self._layouts[name].shape)

    def split(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse of `gather`: this rank's part of a whole tensor that every rank has. Sends nothing."""
        layout = self._layouts[name]
        if layout.dimension is None or self.mesh.size() == 1:
            return tensor
        return shard(tensor, layout, self.mesh)

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Parameters and buffers as the original module's `state_dict` has them. Collective over the mesh; one tensor at a time.

        With `rank0_only`, empty on the other ranks of the mesh.
        """
        full = {}
        keep = not rank0_only or self.mesh.get_local_rank() == 0
        for name, tensor in self.module.state_dict().items():
            whole = self.gather(name, tensor) if isinstance(tensor, torch.Tensor) else tensor
            if keep:
                full[name] = whole
        return full

    def local_shard(self) -> dict[str, torch.Tensor]:
        """What this rank holds of each parameter; a packed one in its stored shape."""
        return {n: (p.to_local() if isinstance(p, DTensor) else p).detach() for n, p in self.module.named_parameters()}

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, torch.Tensor], *, source_rank: int | None = None) -> None:
        """Loads a whole state, in place, whatever number of ranks it was gathered from.

        Args:
            state: as `full_state_dict`, or the plain model's `state_dict`, gives it.
            source_rank: the one rank of the mesh that has it, others pass an empty one; the call is then collective. None: all have it.

        Raises:
            ConfigurationError: a name is missing or unknown, or a shape differs; nothing is changed, on any rank.
        """
        own = {name: t for name, t in self.module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
        problem = self._problem(state, own) if source_rank is None or self.mesh.get_local_rank() == source_rank else None
        if source_rank is not None:
            told: list[Any] = [problem]
            dist.broadcast_object_list(told, group=self.mesh.get_group(), group_src=source_rank)
            problem = told[0]
        if problem is not None:
            raise ConfigurationError(f"load_full_state_dict: {problem}")
        loaded: set[int] = set()
        for name, tensor in own.items():
            if id(tensor) in loaded:
                continue  # tied
            loaded.add(id(tensor))
            shape = self._shape(name, tensor)
            if source_rank is None:
                whole = state[name].to(tensor.device, tensor.dtype)
            else:
                mine = self.mesh.get_local_rank() == source_rank
                whole = (
                    state[name].to(tensor.device, tensor.dtype) if mine else torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
                ).contiguous()
                dist.broadcast(whole, group=self.mesh.get_group(), group_src=source_rank)
            if isinstance(tensor, DTensor):
                part = self.split(name, whole)
                assert isinstance(part, DTensor)
                tensor.to_local().copy_(part.to_local())
            else:
                tensor.copy_(whole)

    def _shape(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        return self._layouts[name].shape if name in self._layouts else tuple(tensor.shape)

    def _problem(self, state: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> str | None:
        missing, unknown = sorted(set(own) - set(state)), sorted(set(state) - set(own))
        if missing or unknown:
            return (
                f"the state lacks {missing[:3]} and has {unknown[:3]} that the model does not; expected the names of the model's state_dict"
            )
        for name, tensor in own.items():
            if tuple(state[name].shape) != self._shape(name, tensor):
                return f"{name} has the shape {tuple(state[name].shape)}, the model's {self._shape(name, tensor)}"
        return None
