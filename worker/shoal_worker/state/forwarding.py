"""An optimizer that wraps another optimizer.

Both share their parameter groups and state, so schedulers and code that inspects them work with
either. Subclasses override the methods that they change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ForwardingOptimizer(torch.optim.Optimizer):
    """Forwards all calls to `optimizer`, the wrapped optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Not torch's constructor, which would create separate parameter groups and state.
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """State of the wrapped optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the wrapped optimizer."""
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, like torch's `zero_grad`."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's state dict."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the wrapped optimizer's state dict."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        """Forwards missing attributes to the wrapped optimizer."""
        if name == "optimizer":  # before the constructor has run, as in a copy
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"
