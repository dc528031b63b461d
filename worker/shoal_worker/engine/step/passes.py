"""Functions for the forward and backward passes in all engines: calling the module, computing its
loss, and observing the backward pass."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, Final, Literal

import numpy as np
import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from torch import nn

from shoal_worker.config import ShardingConfiguration
from shoal_worker.elastic.contract.step import Step
from shoal_worker.torch_internals import pytree

Loss = Callable[[Any, Any], torch.Tensor]
"""Computes the loss from an output and its targets. Returns one number, such as the mean over the
batch."""


def call_module(module: Callable[..., Any], inputs: Any) -> Any:
    """Calls `module` with `inputs`: a mapping as keyword arguments, a tuple as positional
    arguments, anything else as one argument."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, tuple):
        return module(*inputs)
    return module(inputs)


def loss_of(output: Any, targets: Any, loss_fn: Loss | None) -> torch.Tensor:
    """Returns the loss of an output: `loss_fn(output, targets)`, or the output's `.loss`.

    Raises:
        ConfigurationError: the output has no loss, or the loss is not a single number.
    """
    if loss_fn is not None:
        return _one_number(loss_fn(output, targets))
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise ConfigurationError(
            "train_step without loss_fn needs an output with a .loss tensor, but the model "
            f"returned {type(output).__name__}"
        )
    return _one_number(loss)


def _one_number(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else repr(loss)
        )
        raise ConfigurationError(
            f"the loss is {found}; expected a tensor of one element, such as the mean over the "
            "batch"
        )
    return loss


def check_reproducible(config: ShardingConfiguration, step: Step) -> None:
    """Raises ConfigurationError if the configuration has `deterministic=True`, but the step's
    result depends on the number of ranks."""
    if config.deterministic and not step.in_micro_batches:
        raise ConfigurationError(
            "deterministic=True needs micro-batches, whose results do not depend on the number "
            "of ranks; pass micro_batch_size= to the ElasticDataLoader and iterate over "
            "loader.steps()"
        )


def half_a_pass() -> PreconditionError:
    """Returns the error for a script that continues a step although one of the step's backward
    passes has raised an exception."""
    return PreconditionError(
        "a backward pass of this step failed midway: some of its gradients were sent to the "
        "other ranks and others are missing, so this rank can neither finish the step nor undo "
        "it; let the error end the process",
        reason="BACKWARD_INCOMPLETE",
    )


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Returns the distinct tensors in `tree` (the inputs or outputs of a module), in order of
    nesting depth. Searches containers, dataclasses, and attributes of other objects."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: dict[int, torch.Tensor] = {}
    seen: dict[int, Any] = {}
    ahead, of_objects = deque([tree]), deque[Any]()
    left = _MOST_OF_OBJECTS
    while ahead or (of_objects and left):
        in_object = not ahead
        one = of_objects.popleft() if in_object else ahead.popleft()
        left -= in_object
        if isinstance(one, torch.Tensor):
            found[id(one)] = one
        elif not isinstance(one, _WITHOUT_TENSORS) and id(one) not in seen:
            seen[id(one)] = one
            items = _items_of(one)
            if items is None:
                of_objects.extend(_attributes_of(one))
            elif in_object:
                of_objects.extend(islice(items, left))
            else:
                ahead.extend(items)
    return [*found.values()]


def _items_of(one: Any) -> Iterable[Any] | None:
    """Returns the items of a container; None for other objects. Mappings other than dict are
    treated as other objects, because they may compute their values or read them from a file."""
    if isinstance(one, dict | MappingProxyType):
        return one.values()
    if isinstance(one, list | tuple | set | frozenset):
        return one
    leaves = pytree.tree_leaves(one)
    return None if len(leaves) == 1 and leaves[0] is one else leaves


def _attributes_of(one: Any) -> Iterable[Any]:
    slots = [
        _mangled(name, kind)
        for kind in type(one).__mro__
        if (names := kind.__dict__.get("__slots__")) is not None
        for name in ([names] if isinstance(names, str) else names)
    ]
    attributes = (
        name for name in slots if name not in ("__dict__", "__weakref__") and hasattr(one, name)
    )
    return [*getattr(one, "__dict__", {}).values(), *(getattr(one, name) for name in attributes)]


def _mangled(name: str, kind: type) -> str:
    """Returns the attribute name of the slot `name` of the class `kind`. Python adds the class name
    to private names."""
    private = name.startswith("__") and not name.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{name}" if private and kind.__name__.strip("_") else name


_WITHOUT_TENSORS: Final = (
    *(type(None), bool, int, float, complex, str, bytes, type, enum.Enum, np.ndarray, np.generic),
    *(
        torch.dtype,
        torch.device,
        torch.Generator,
        nn.Module,
        ModuleType,
        FunctionType,
        MethodType,
        BuiltinFunctionType,
    ),
)
_MOST_OF_OBJECTS: Final = 10_000
"""Maximum number of values inspected in attributes of objects. There is a limit because an
attribute may refer to a dataset."""


def when_gradients_come(
    tree: Any, call: Callable[[Any], None], *, mode: Literal["any", "all"]
) -> bool:
    """Registers `call` to run once in a backward pass: as soon as any (or all, depending on `mode`)
    of the tensors in `tree` that require gradients have received them. Returns False if `tree`
    contains no such tensor."""
    found = [tensor for tensor in tensors_in(tree) if tensor.requires_grad]
    if len(found) == 1:
        found[0].register_hook(call)  # equivalent to the other hook, at a tenth of its cost
    elif found:
        torch.autograd.graph.register_multi_grad_hook(found, call, mode=mode)
    return bool(found)
