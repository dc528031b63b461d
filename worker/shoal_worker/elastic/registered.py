"""State that the user registered: sent to joiners, put back on a redo, saved in checkpoints.

Schedulers and gradient scalers advance by a call that the user's loop makes after `optimizer.step()`. When the step was lost, that call
must do nothing. So their `step` (of a scheduler) or `update` (of a scaler) is wrapped at registration, and the wrapper asks this class.
All of it runs on the training thread.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from shoal_common.errors import ConfigurationError

from shoal_worker.state.tree import flatten

_log = logging.getLogger(__name__)


@runtime_checkable
class Stateful(Protocol):
    """What can be registered."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class RegisteredState:
    """Named stateful objects and their gates."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}
        self._pending: dict[str, Any] = {}
        self._void = False
        """The last step was void: ignore every advance until the next step begins."""

    def register(self, name: str, value: object) -> None:
        """Adds `value` under `name`; a state that waited under that name is loaded into it.

        Raises:
            ConfigurationError: it has no state_dict/load_state_dict, its state cannot be carried, or the name is taken by another object.
        """
        if not isinstance(value, Stateful):
            raise ConfigurationError(
                f"register_state({name}=...): {type(value).__name__} has no state_dict() and load_state_dict(); "
                "register an object that has both"
            )
        if name in self._objects and self._objects[name] is not value:
            raise ConfigurationError(f"register_state({name}=...): the name {name!r} is taken by another object; choose another name")
        if name in self._objects:
            return
        flatten({name: value.state_dict()})  # says now what could not be sent or saved later
        self._objects[name] = value
        advance = "update" if hasattr(value, "get_scale") else "step"
        if callable(getattr(value, advance, None)):
            self._gate(name, value, advance)
        if name in self._pending:
            value.load_state_dict(self._pending.pop(name))

    def find(self, name: str) -> Stateful | None:
        """The object registered under `name`."""
        return self._objects.get(name)

    def loss_scale(self) -> float:
        """What the registered GradScalers, if there are any, multiply the loss with now."""
        return math.prod(float(value.get_scale()) for value in self._objects.values() if hasattr(value, "get_scale"))

    def capture(self) -> dict[str, Any]:
        """The state of all objects."""
        return {"states": {name: value.state_dict() for name, value in self._objects.items()} | self._pending}

    def restore(self, captured: Mapping[str, Any]) -> None:
        """Loads a captured state. States of names that are not registered yet wait for them."""
        states = dict(captured["states"])
        for name, value in self._objects.items():
            if name in states:
                value.load_state_dict(states.pop(name))
        self._pending = states

    def restoring(self) -> Callable[[], None]:
        """A call that puts back what all objects have now, as far as they take it, after a `restore` that was refused."""
        before = {name: copy.deepcopy(value.state_dict()) for name, value in self._objects.items()}
        pending = self._pending

        def put_back() -> None:
            for name, state in before.items():
                try:
                    self._objects[name].load_state_dict(state)
                except Exception as error:  # a user's own; the others are put back all the same
                    _log.warning("the registered state %r could not be put back: %s", name, error)
            self._pending = pending

        return put_back

    def step_begins(self) -> None:
        """The next step begins: advances count again."""
        self._void = False

    def step_void(self) -> None:
        """The step was lost: its advances must not count."""
        self._void = True

    def _gate(self, name: str, value: Any, method: str) -> None:
        advance, kind = getattr(value, method), type(value)

        @functools.wraps(advance)
        def gated(own: Any, *args: Any, **kwargs: Any) -> Any:
            if own is not value:  # a copy of it, which is nobody's but the user's
                return getattr(kind, method)(own, *args, **kwargs)
            if self._void:
                if method == "update":
                    value._per_optimizer_states.clear()  # as its update() ends, or the next step would count as the second
                return None
            return advance(*args, **kwargs)  # bound before the class changed

        # A class of its own, not an attribute of the instance: schedulers put their instance attributes into state_dict().
        value.__class__ = type(kind.__name__, (kind,), {method: gated, "__module__": kind.__module__, "__qualname__": kind.__qualname__})
