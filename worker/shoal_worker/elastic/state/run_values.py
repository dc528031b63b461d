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

    def state_dict(self) -> dict[str, Any]:
        """Returns the value in a dict, for `load_state_dict`."""
        return {"value": self.value}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the value received from a peer or read from a checkpoint."""
        self.value = state_dict["value"]


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
