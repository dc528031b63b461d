"""Counts every collective that a piece of code really sends, with its bytes.

Sees functional collectives (DTensor's) and those of c10d. `TensorParallelPlan.communication` is
what a plan expects.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, order=True)
class Collective:
    """One collective call."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, scatter, gather."""
    payload_bytes: int
    """Number of bytes of the larger of input and output on this rank."""
    dtype: torch.dtype

    def bytes_sent(self, size: int) -> float:
        """Returns the bytes sent by one of `size` ranks, on average, with the best algorithm."""
        once = self.payload_bytes * (size - 1) / size
        return 2 * once if self.kind == "all_reduce" else once


class CollectiveCounter(TorchDispatchMode):
    """Within `with CollectiveCounter() as counter:`, records all collectives of this thread and of
    the backward passes that it runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self.collectives: list[Collective] = []

    def counts(self) -> Counter[str]:
        """Returns the number of collectives of each kind."""
        return Counter(c.kind for c in self.collectives)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = (
            _KINDS.get(func._schema.name)
            if func.namespace in ("c10d", "_c10d_functional", "c10d_functional")
            else None
        )
        if kind is not None:
            tensors = [t for t in pytree.tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
            largest = max(tensors, key=lambda t: t.numel() * t.element_size())
            self.collectives.append(
                Collective(kind, largest.numel() * largest.element_size(), largest.dtype)
            )
        return result


_KINDS = {
    f"{namespace}::{name}": kind
    for kind, names in {
        "all_reduce": ("all_reduce", "all_reduce_", "allreduce_"),
        "all_gather": ("all_gather_into_tensor", "_allgather_base_", "allgather_"),
        "reduce_scatter": ("reduce_scatter_tensor", "_reduce_scatter_base_", "reduce_scatter_"),
        "all_to_all": ("all_to_all_single", "alltoall_base_", "alltoall_"),
        "broadcast": ("broadcast", "broadcast_"),
        "scatter": ("scatter_",),
        "gather": ("gather_",),
    }.items()
    for name in names
    for namespace in ("c10d", "_c10d_functional", "c10d_functional")
}
