"""Hooks on the user's modules and parameters, which call whoever follows the passes through them (`execution.py`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from shoal_common.errors import PreconditionError
from torch import nn
from torch.utils import _pytree as pytree


def when_gradients_come(tree: Any, call: Callable[[Any], None], *, mode: Literal["any", "all"]) -> None:
    """Calls `call` once in a backward pass: when any, or all, of the tensors in `tree` that want a gradient get theirs."""
    leaves = [tree] if isinstance(tree, torch.Tensor) else pytree.tree_leaves(tree)
    found = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    if len(found) == 1:
        found[0].register_hook(call)  # what the other comes down to, at a tenth of its price
    elif found:
        torch.autograd.graph.register_multi_grad_hook(found, call, mode=mode)


class GradientHook:
    """Calls when autograd has left a parameter its gradient.

    It must not lead back to the parameter: Python's collector does not see such a cycle, and the model would never be freed.
    """

    def __init__(self, ready: Callable[[int, int], None], number: int, index: int) -> None:
        """`ready`: a method, called with `number` and `index` for as long as its object lives."""
        self._ready, self._number, self._index = weakref.WeakMethod(ready), number, index

    def __call__(self, _: torch.Tensor) -> None:
        ready = self._ready()
        if ready is not None:
            ready(self._number, self._index)


class _ModuleHook:
    """A hook of one module; in a copy of the module (`clone`) it does nothing."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _do_nothing

    def __reduce__(self) -> Any:
        raise PreconditionError(
            "the module is cut over the ranks and cannot be pickled (torch.save(module) does): save model.full_state_dict() or "
            "model.clone(), on every rank"
        )


def _do_nothing(*_args: Any, **_kwargs: Any) -> None: ...


class BeforeForward(_ModuleHook):
    """Calls with a module's inputs, before the module computes. Registered with `with_kwargs=True`."""

    def __init__(self, call: Callable[[Any], None]) -> None:
        self._call = call

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's is untyped
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._call(args[0] if len(args) == 1 and not kwargs else (args, kwargs))


class AfterForward(_ModuleHook):
    """Calls with a module's output, after the module has computed."""

    def __init__(self, call: Callable[[Any], None]) -> None:
        self._call = call

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's is untyped
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._call(output)
