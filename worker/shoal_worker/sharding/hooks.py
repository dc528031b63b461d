"""The hooks by which a `ShardedExecution` hears of the passes through the user's modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from shoal_common.errors import PreconditionError
from torch import nn
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from shoal_worker.sharding.execution import Block, ShardedExecution


def when_gradients_come(tree: Any, call: Callable[[Any], None], *, mode: Literal["any", "all"]) -> None:
    """Calls `call` once in a backward pass: when any, or all, of the tensors in `tree` that want a gradient get theirs."""
    leaves = [tree] if isinstance(tree, torch.Tensor) else pytree.tree_leaves(tree)
    found = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    if len(found) == 1:
        found[0].register_hook(call)  # what the other comes down to, at a tenth of its price
    elif found:
        torch.autograd.graph.register_multi_grad_hook(found, call, mode=mode)


class GradientHook:
    """After autograd has left a parameter its gradient.

    It must not lead back to the parameter: Python's collector does not see such a cycle, and the model would never be freed.
    """

    def __init__(self, execution: ShardedExecution, number: int, index: int) -> None:
        """`number`: the unit's place in the order in which gradients are reduced; `index`: the parameter's place in the unit."""
        self._execution, self._number, self._index = weakref.ref(execution), number, index

    def __call__(self, _: torch.Tensor) -> None:
        execution = self._execution()
        if execution is not None:
            execution.gradient_ready(self._number, self._index)


class _Hook:
    """Of this module's; a copy of it (`clone`) has none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _do_nothing

    def __reduce__(self) -> Any:
        raise PreconditionError(
            "the module is cut over the ranks and cannot be pickled (torch.save(module) does): save model.full_state_dict() or "
            "model.clone(), on every rank"
        )


def _do_nothing(*_args: Any, **_kwargs: Any) -> None: ...


class BeforeForward(_Hook):
    """Before a block computes."""

    def __init__(self, execution: ShardedExecution, block: Block) -> None:
        self._execution, self._block = execution, block

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's is untyped
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._execution.before_forward(self._block, args[0] if len(args) == 1 and not kwargs else (args, kwargs))


class Show(_Hook):
    """Before passes with parameters that are copies of shards."""

    def __init__(self, execution: ShardedExecution) -> None:
        self._execution = execution

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's is untyped
    def __call__(self, module: nn.Module, args: Any) -> None:
        for unit in self._execution.units:
            unit.hidden.show()


class Hide(Show):
    """After them, if no backward pass follows."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's is untyped
    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if not torch.is_grad_enabled():
            self._execution.free_all()


class AfterForward(_Hook):
    """After it has."""

    def __init__(self, execution: ShardedExecution, block: Block) -> None:
        self._execution, self._block = execution, block

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's is untyped
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._execution.after_forward(self._block, output)
