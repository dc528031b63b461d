"""A model that is sharded over the ranks of a mesh and has the values of the unsharded one. Its
shards can be gathered again."""

from __future__ import annotations

import torch
from shoal_worker.tensor_parallel import DropoutRandomness, TensorParallelPlan, parallelize
from shoal_worker.tensor_parallel.split_plan import Share, cut
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


class SplitModel:
    """Shards `module` in place."""

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        plan: TensorParallelPlan,
        dropout: DropoutRandomness = DropoutRandomness.PER_SHARD,
    ) -> None:
        self.plan = plan
        self._module = module
        whole = dict(module.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        layouts = {layout.name: layout for layout in plan.parameters}
        parallelize(
            module,
            mesh,
            plan,
            share=Share(parameters=frozenset(whole), elsewhere=()),
            dropout=dropout,
        )
        self._layouts = {
            name: layouts[first.setdefault(id(parameter), name)]
            for name, parameter in whole.items()
        }
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if isinstance(parameter, DTensor):
                    parameter.to_local().copy_(
                        cut(whole[name], self._layouts[name], mesh.size(), mesh.get_local_rank())
                    )
                else:
                    parameter.copy_(whole[name])

    def gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Gathers a tensor that is sharded like the parameter `name`. All ranks must call it."""
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        return tensor.full_tensor().detach().reshape(self._layouts[name].shape)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Gathers parameters and buffers under the names and shapes of the unsharded model. All
        ranks must call it."""
        return {
            name: self.gather(name, tensor) for name, tensor in self._module.state_dict().items()
        }

    def bytes_here(self) -> int:
        """Returns the bytes of this rank's shards of the parameters."""
        parts = [p.to_local() if isinstance(p, DTensor) else p for p in self._module.parameters()]
        return sum(part.numel() * part.element_size() for part in parts)
