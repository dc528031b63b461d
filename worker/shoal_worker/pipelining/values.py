"""What goes into a stage and what comes out of it.

A `Call` is what the model is called with; every stage has it, since ranks of one replica are given the same batch. A `Border` is what goes
from one stage to the next: tensors, and how the model wraps them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of the model's forward."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: Any) -> Call:
        """A mapping is keyword arguments, a tuple positional ones, all else one argument."""
        if isinstance(inputs, Mapping):
            return cls(kwargs=dict(inputs))
        return cls(args=inputs if isinstance(inputs, tuple) else (inputs,))


@dataclass(frozen=True, kw_only=True)
class Border:
    """What one stage hands to the next."""

    tensors: tuple[torch.Tensor, ...]
    wrapped: int = 0
    """Length of the tuple that the model wraps them in; 0: it is a bare tensor."""
    given: int = 0
    """Layered models hand on the first element of that tuple alone. Bits of the other elements that are there too, and not None."""

    @classmethod
    def of(cls, value: Any, what: str) -> Border:
        """A chain's value between two blocks: a tensor, or a tuple of tensors.

        Raises:
            TypeError: it is something else, which cannot be sent.
        """
        if isinstance(value, torch.Tensor):
            return cls(tensors=(value,))
        if isinstance(value, tuple | list) and value and all(isinstance(one, torch.Tensor) for one in value):
            return cls(tensors=tuple(value), wrapped=len(value))
        raise TypeError(f"{what} returned {type(value).__name__}; between stages go a tensor or a tuple of tensors: give other cut_points")

    def value(self) -> Any:
        """The value as the next block of a chain takes it."""
        return self.tensors if self.wrapped else self.tensors[0]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested mappings, tuples, lists and the attributes of plain objects' mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)


def keep_gradients_from(output: Any) -> None:
    """What comes back to an output in the backward pass becomes nought, also what is no number."""
    for one in pytree.tree_leaves(output):
        if isinstance(one, torch.Tensor) and one.requires_grad:
            one.register_hook(torch.zeros_like)
