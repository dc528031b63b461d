"""Plain values that belong to a run's state, such as the best accuracy so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from typing_extensions import override

_PLAIN: Final = (
    int,
    float,
    complex,
    str,
    bytes,
    list,
    tuple,
    set,
    frozenset,
    dict,
    type(None),
    torch.Tensor,
    np.ndarray,
    np.generic,
)
"""Types of plain values, which can be registered although they have no state_dict and
load_state_dict."""


class RunValue:
    """Wraps a plain value as an object that can be registered."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._given = value
        """The object that the script registered, for which it may have another name."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the value in a dict, for `load_state_dict`."""
        return {"value": self.value}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the value received from a peer or read from a checkpoint: in place if the value is
        still the object that the script registered. Another object may also be part of other
        values, so it is replaced."""
        loaded = state_dict["value"]
        if self.value is not self._given or not _written(self.value, loaded):
            self.value = loaded


class RunValues:
    """Registered plain values, which are read and written as attributes: `run.best = max(run.best,
    accuracy)`."""

    def __init__(self, values: Mapping[str, RunValue]) -> None:
        object.__setattr__(self, "_values", dict(values))

    def __getattr__(self, name: str) -> Any:
        return self._value(name).value

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        self._value(name).value = value

    @override
    def __repr__(self) -> str:
        values: dict[str, RunValue] = self.__dict__["_values"]
        return f"RunValues({', '.join(f'{name}={one.value!r}' for name, one in values.items())})"

    def _value(self, name: str) -> RunValue:
        values: dict[str, RunValue] = self.__dict__.get("_values", {})
        if name not in values:
            known = ", ".join(values) or "none"
            raise AttributeError(
                f"{name!r} is not a value of the run's state; expected one passed to "
                f"register_state ({known}). To add it, call shoal.register_state({name}=...)"
            )
        return values[name]


def values_in(objects: Mapping[str, object]) -> dict[str, RunValue]:
    """Returns the plain values among `objects`, each wrapped in a `RunValue`."""
    return {
        name: RunValue(one)
        for name, one in objects.items()
        if isinstance(one, _PLAIN) and not hasattr(one, "load_state_dict")
    }


def _written(own: Any, loaded: Any) -> bool:
    """Writes the value of `loaded` into `own`, if `own` can change and its kind is the same.
    Returns whether it has done so."""
    if isinstance(own, dict) and isinstance(loaded, Mapping):
        values = dict(loaded)
        own.clear()
        own.update(values)
    elif isinstance(own, list) and isinstance(loaded, list):
        own[:] = loaded
    elif isinstance(own, set) and isinstance(loaded, set):
        values_in_set = set(loaded)
        own.clear()
        own.update(values_in_set)
    elif isinstance(own, torch.Tensor) and isinstance(loaded, torch.Tensor):
        if (own.shape, own.dtype, own.layout) != (loaded.shape, loaded.dtype, torch.strided):
            return False
        if own.is_inference() or 0 in own.stride():  # cannot be written
            return False
        with torch.no_grad():
            own.copy_(loaded)
    elif isinstance(own, np.ndarray) and isinstance(loaded, np.ndarray):
        if (own.shape, own.dtype) != (loaded.shape, loaded.dtype) or not own.flags.writeable:
            return False
        own[...] = loaded
    else:
        return False
    return True
