"""The scope of a forward pass in which plain tensors and DTensors meet.

DTensor refuses to mix with plain tensors, draws the same dropout mask on every shard on CPU, cannot run scaled_dot_product_attention there
(it never comes back), and gathers what it has no rule for. Within a region, a torch function that is called with a DTensor
  - gets its plain tensors as replicated DTensors. A tensor that needs a gradient is turned once for all of a block's layers that take it,
    so that query, key and value together cost one all-reduce in the backward pass;
  - runs by a rule of ours where there is one (rules.py).
Calls without a DTensor run as ever. Regions nest; only the outermost installs the mode. Each thread has its own: a rank may be a thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from shoal_worker.tensor_parallel.context import DropoutRandomness, ParallelContext, holds_dtensor
from shoal_worker.tensor_parallel.rules import RULES


class _Active(threading.local):
    mode: RegionMode | None = None


_active = _Active()


class RegionMode(TorchFunctionMode):
    """Installed by `region`. Belongs to one thread."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        self.context = context
        self.entered: list[dict[tuple[int, int], tuple[torch.Tensor, DTensor]]] = [{}]
        """For each open region, what was turned in it: by the identity and version of the tensor. Holds the tensor, so that no other gets
        its identity meanwhile."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not holds_dtensor(args) and not holds_dtensor(tuple(kwargs.values())):
            return func(*args, **kwargs)
        rule = RULES.get(func)
        if rule is not None:
            return rule(self, func, args, kwargs)
        return func(*self.enter_all(args), **{name: self.enter_all(value) for name, value in kwargs.items()})

    def enter(self, tensor: torch.Tensor) -> DTensor:
        """The tensor as one that every rank holds whole: what goes into a layer that is split."""
        if isinstance(tensor, DTensor) and tensor.placements == (Replicate(),):
            return tensor
        if not isinstance(tensor, DTensor) and not (tensor.requires_grad and torch.is_grad_enabled()):
            return self._turned(tensor)  # costs nothing, in either direction
        key = (id(tensor), 0 if tensor.is_inference() else tensor._version)
        found = self.entered[-1].get(key)
        if found is None:
            found = self.entered[-1][key] = (tensor, self._turned(tensor))
        return found[1]

    def enter_all(self, value: Any) -> Any:
        """Turns the plain tensors in an argument; lists and tuples of them too."""
        if isinstance(value, torch.Tensor):
            return value if isinstance(value, DTensor) else self.enter(value)
        if isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor | list | tuple) for v in value):
            turned = [self.enter_all(v) for v in value]
            return turned if isinstance(value, list) else tuple(turned)
        return value

    def _turned(self, tensor: torch.Tensor) -> DTensor:
        if isinstance(tensor, DTensor):
            return tensor.redistribute(placements=[Replicate()])
        return self.context.replicated(tensor)


@contextlib.contextmanager
def region(context: ParallelContext, *, leaf: bool = False) -> Iterator[RegionMode]:
    """Opens a region on this thread, nested in the one that is open for the same mesh.

    A `leaf` shares what was turned in the region around it.
    """
    outer = _active.mode
    if outer is not None and outer.context.mesh is context.mesh:
        if leaf:
            yield outer
            return
        outer.entered.append({})
        try:
            yield outer
        finally:
            outer.entered.pop()
        return
    mode = RegionMode(context)
    _active.mode = mode
    try:
        with contextlib.ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                # There DTensor gives some views (flatten, unflatten) the shape of the local tensor.
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            stack.enter_context(mode)
            yield mode
    finally:
        _active.mode = outer


@contextlib.contextmanager
def loss_parallel(mesh: DeviceMesh) -> Iterator[None]:
    """Within, F.cross_entropy and nn.CrossEntropyLoss take logits that are split over the vocabulary; others are as ever.

    Needed only around a loss that is computed outside the model, whose plan has `loss_parallel=True`. The backward pass may be outside.
    """
    with region(ParallelContext(mesh, sequence_dimension=None, dropout=DropoutRandomness.PER_SHARD)):
        yield
