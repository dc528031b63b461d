"""The tensor-parallel group of a model's layers, and the conversion of tensors between plain
tensors and DTensors on this group.

Between blocks, activations are plain tensors that are the same on every rank. With sequence
parallelism, they are DTensors split along the sequence. Within a block, activations are DTensors,
so the model's own code sees full shapes: numbers of heads, hidden sizes and reshapes need not be
changed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shoal_worker.torch_internals import compute_local_shape_and_global_offset, needs_torch


class DropoutRandomness(StrEnum):
    """Ways to draw the random numbers for dropout on split activations. For activations that are
    not split, all ranks draw the same numbers."""

    PER_SHARD = "per_shard"
    """Each rank draws numbers only for its own shard, with a seed that all ranks draw together.
    That is 1/N of the numbers that a single process draws."""
    AS_ONE_PROCESS = "as_one_process"
    """Every rank draws the mask of the full activation and uses its own part. The numbers are the
    same as on a single process."""


class ParallelContext:
    """One tensor-parallel group, its one-dimensional mesh, and settings for activations. Copies of
    a module share the same context."""

    def __init__(
        self, mesh: DeviceMesh, *, sequence_dimension: int | None, dropout: DropoutRandomness
    ) -> None:
        self.mesh = mesh
        self.sequence_dimension = sequence_dimension
        self.dropout = dropout

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelContext:
        return self

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def size(self) -> int:
        return self.mesh.size()

    def replicated(self, tensor: torch.Tensor) -> DTensor:
        """Converts a tensor that is the same on all ranks to a replicated DTensor. The backward
        pass sums the ranks' gradients."""
        return DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)

    def sharded(self, local: torch.Tensor, dimension: int) -> DTensor:
        """Returns a DTensor that is split along `dimension`. `local`: this rank's part, which must
        have the same size on all ranks."""
        return DTensor.from_local(
            local, self.mesh, [Shard(dimension % local.ndim)], run_check=False
        )

    def leave(self, output: DTensor) -> torch.Tensor:
        """Converts the output of a block for use outside of it, and sums it across ranks. Returns
        the full tensor or, with sequence parallelism, a tensor split along the sequence."""
        if self.sequence_dimension is not None and output.ndim > max(2, self.sequence_dimension):
            length, ranks = output.shape[self.sequence_dimension], self.mesh.size()
            if length % ranks:
                what = (
                    f"sequence_dimension={self.sequence_dimension} with a sequence length of "
                    f"{length}, not divisible by {ranks} ranks,"
                )
                needs_torch(2, 13, what, "pad the sequence, or leave sequence_dimension out")
            return output.redistribute(placements=[Shard(self.sequence_dimension)])
        return whole(output)


def whole(tensor: DTensor) -> torch.Tensor:
    """Returns the full tensor on every rank. The gradient of the result must be the same on all
    ranks."""
    return tensor.redistribute(placements=[Replicate()]).to_local()


def placement_of(tensor: DTensor) -> Placement:
    """Returns the tensor's placement on the only dimension of the mesh."""
    return tensor.placements[0]


def split_dimension(tensor: DTensor) -> int | None:
    """Returns the dimension that is split into contiguous pieces. Returns None if the tensor is
    replicated, is not summed yet (`Partial`), or is split in any other way."""
    placement = placement_of(tensor)
    # _StridedShard is not a subclass of Shard
    return placement.dim if isinstance(placement, Shard) else None


def local_offset(tensor: DTensor, dimension: int) -> int:
    """Returns the index along `dimension` where this rank's piece begins."""
    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return int(offsets[dimension])


def grad_partial(tensor: DTensor) -> torch.Tensor:
    """Returns the local part of a replicated tensor, for computations of which each rank does only
    a part. The backward pass therefore sums its gradient across ranks."""
    return tensor.to_local(grad_placements=[Partial()])


def holds_dtensor(values: Any) -> bool:
    """Returns whether the values, including nested lists and tuples, contain a DTensor."""
    return any(
        isinstance(v, DTensor) or (isinstance(v, list | tuple) and holds_dtensor(v)) for v in values
    )


def plain(value: Any) -> Any:
    """Replaces every DTensor in an argument, including lists and tuples, with a full plain
    tensor."""
    if isinstance(value, DTensor):
        return whole(value)
    if isinstance(value, list | tuple) and holds_dtensor(value):
        turned = [plain(v) for v in value]
        return turned if isinstance(value, list) else tuple(turned)
    return value
