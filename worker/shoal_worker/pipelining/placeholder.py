"""A tensor that stands for a value which another stage has: right shape, dtype and device, no meaning.

What is computed from a placeholder is one again, so that a result which secretly needs what only another stage has can be told from one
that does not, and refused (partial.py). A fresh tensor that merely looks like a placeholder (zeros_like, new_full) is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from shoal_common.errors import ConfigurationError

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
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def placeholder_like(value: torch.Tensor, device: torch.device) -> Placeholder:
    """A placeholder of the shape and dtype of `value`, which may be on `meta`."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.zeros(value.shape, dtype=value.dtype, device=device).as_subclass(Placeholder)
