"""Schedulers, gradient scalers and averaged models that the script makes: found without being registered.

They advance by calls of the user's loop, so joiners need their state, and a step that is void must not advance them. A script that forgot
`register_state` would train its joiners with other learning rates. torch tells nobody of their making; so `__new__` of their classes notes
each one here, in the order in which the script makes them, which is the same on every rank. The session registers those that belong to its
model or optimizer when the next step begins: by then they are whole.

torch's classes are changed once for the process, when this module is imported; what they do stays the same.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

NAMES: Final[dict[type[Any], str]] = {LRScheduler: "scheduler", torch.amp.GradScaler: "scaler", AveragedModel: "averaged"}
"""What they are registered as, with a number."""

_made: Final[list[tuple[int, weakref.ref[Any]]]] = []
"""By thread: where ranks are threads, each makes its own."""


def newly_made() -> list[Any]:
    """What this thread has made and nobody has asked for, oldest first."""
    here = threading.get_ident()
    own = [made for thread, made in _made if thread == here]
    if own:
        _made[:] = [(thread, made) for thread, made in _made if thread != here]
    return [one for made in own if (one := made()) is not None]


def _note(kind: Any) -> None:
    plain: Any = kind.__new__

    def new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        one = plain(cls) if plain is object.__new__ else plain(cls, *args, **kwargs)
        _made.append((threading.get_ident(), weakref.ref(one)))
        return one

    kind.__new__ = new


for _kind in NAMES:
    _note(_kind)
