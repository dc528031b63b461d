"""Tensors that stand for what only another stage has.

A `Placeholder` stands for a value: right shape, dtype and device, no meaning. What is computed from one is one again, so that a result
which secretly needs what only another stage has can be told from one that does not, and refused (partial.py). A fresh tensor that merely
looks like a placeholder (zeros_like, new_full) is none.

An `Absent` stands for a parameter, takes no memory, and cannot be computed with. Being on `meta` would not do for that: a matrix product of
a CPU tensor and one on `meta` is a CPU tensor of arbitrary values (torch 2.13), without any error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from shoal_common.errors import ConfigurationError
from torch import nn

_FRESH: Final = frozenset(
    {
        torch.zeros_like,
        torch.ones_like,
        torch.full_like,
        torch.empty_like,
        torch.rand_like,
        torch.randn_like,
        torch.Tensor.new_zeros,
        torch.Tensor.new_ones,
        torch.Tensor.new_full,
        torch.Tensor.new_empty,
        torch.Tensor.new_tensor,
    }
)
_READS: Final = frozenset(
    {
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.__bool__,
        torch.Tensor.__int__,
        torch.Tensor.__float__,
        torch.Tensor.__index__,
        torch.equal,
        torch.allclose,
        torch.Tensor.equal,
        torch.Tensor.allclose,
    }
)

_LOOKS: Final = frozenset(
    {"__get__", "__set__", "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "is_floating_point", "is_complex"}
    | {"detach", "requires_grad_", "t", "__repr__", "__len__", "__hash__", "data_ptr", "get_device"}
)
"""What can be done with an Absent."""


class Placeholder(torch.Tensor):
    """See the module's docstring."""

    received: torch.Tensor | None = None
    """The value that took its place, once it did: what runs again (activation checkpointing) finds it here."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _READS:
            raise ConfigurationError(
                f"the model's forward decides by values that only another pipeline stage has ({getattr(func, '__name__', func)}): let "
                f"it decide by "
                "its inputs alone, or give the model a method pipeline_blocks()"
            )
        if func in _FRESH:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's is untyped


class Absent(torch.Tensor):
    """See the module's docstring. Attributes can be looked at; a transposed or detached one is Absent again."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in _LOOKS:
            raise ConfigurationError(
                f"the model's forward uses ({name}) parameters of a module that is on another pipeline stage, other than by calling that "
                "module: use a module for it (a tied nn.Linear head, say), or give the model a method pipeline_blocks()"
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's is untyped


def absent_like(tensor: torch.Tensor) -> torch.Tensor:
    """An Absent in the place of a parameter or buffer."""
    with torch._C.DisableTorchFunctionSubclass():
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").as_subclass(Absent)  # not like a DTensor
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def placeholder_like(value: torch.Tensor, device: torch.device) -> Placeholder:
    """A placeholder of the shape and dtype of `value`, which may be on `meta`."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.zeros(value.shape, dtype=value.dtype, device=device).as_subclass(Placeholder)
