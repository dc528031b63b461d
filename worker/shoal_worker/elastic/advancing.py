"""Schedulers, gradient scalers and averaged models that the script makes: found without being registered.

They advance by calls of the user's loop, so joiners need their state, and a step that is void must not advance them. A script that forgot
`register_state` would train its joiners with other learning rates. torch tells nobody of their making; so `__new__` of their classes notes
each one here, with a number that counts those of its kind as the script makes them, which is the same on every rank. The session registers
those that belong to its model or optimizer when the next step begins: by then they are whole.

Copies (`copy.deepcopy` of the best average so far, say) are the user's own, and are not noted. torch's classes are changed once for the
process, when this module is imported; what they do stays the same.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from typing import Any, Final, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

NAMES: Final[dict[type[Any], str]] = {LRScheduler: "scheduler", torch.amp.GradScaler: "scaler", AveragedModel: "averaged"}
"""What they are registered as, with a number."""


class Made(NamedTuple):
    """One that the script has made."""

    name: str
    one: Any


class _Thread(threading.local):
    """Where ranks are threads, each makes its own."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.made: list[tuple[str, weakref.ref[Any]]] = []


_own: Final = _Thread()


def newly_made() -> list[Made]:
    """What this thread has made and nobody has asked for, oldest first."""
    made, _own.made = _own.made, []
    return [Made(name, one) for name, reference in made if (one := reference()) is not None]


def _note(kind: Any, name: str) -> None:
    plain: Any = kind.__new__

    def new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        one = plain(cls) if plain is object.__new__ else plain(cls, *args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__") not in ("copyreg", "copy"):
            _own.made.append((f"shoal.{name}.{_own.counts[name]}", weakref.ref(one)))
            _own.counts[name] += 1
        return one

    kind.__new__ = new


for _kind, _name in NAMES.items():
    _note(_kind, _name)
