"""An optimizer that stands before another one.

Parameter groups and state are the other one's own, so that schedulers and code that looks into them
work on either. What a class of these does otherwise it overrides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ForwardingOptimizer(torch.optim.Optimizer):
    """Everything is `optimizer`'s own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Not torch's constructor: it would make parameter groups and state of this one's own.
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The optimizer's own."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's own."""
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, as torch's `zero_grad` does."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The optimizer's own."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The optimizer's own."""
        self.optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        """What this class lacks is the optimizer's."""
        if name == "optimizer":  # before the constructor has run: a copy, say
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"
