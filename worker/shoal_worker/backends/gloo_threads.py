"""What the threads in which torch runs Gloo's collectives are at: working, or asleep.

Only the kernel knows: torch gives these threads a name and nothing else. Used once a group's connections are broken, to tell operations
that are about to end from those that sleep until their timeout. It does not tell groups apart: the threads of all must be asleep.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Final

_NAME: Final = "pt_gloo_runloop"
_TASKS: Final = Path("/proc/self/task")
_APART_S: Final = 0.003
_FAR_APART_S: Final = 0.1
"""Long enough for a thread that was just woken to get a core of a busy machine."""

_Sample = dict[str, str]
"""By thread: how often it has been scheduled so far."""


def wait_until_asleep(done: threading.Event, at_most_s: float) -> None:
    """Returns when `done` is set, when no thread of Gloo has run for 3 ms, or after `at_most_s`."""
    deadline = time.monotonic() + at_most_s
    before: _Sample | None = None
    while not done.wait(_APART_S) and time.monotonic() < deadline:
        now = _sample()
        if now and now == before:
            return
        before = now


def wait_until_still(at_most_s: float) -> None:
    """Returns when there is no thread of Gloo's, when none has run for 0.1 s, or after `at_most_s`."""
    deadline = time.monotonic() + at_most_s
    now, before = _sample(), None
    while now != {} and (now is None or now != before) and time.monotonic() < deadline:
        time.sleep(_FAR_APART_S)
        now, before = _sample(), now


def _sample() -> _Sample | None:
    """None when one of them runs; empty: there are none under that name."""
    sample: _Sample = {}
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        try:
            fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        except OSError:
            continue  # ended since it was listed
        if fields["Name"].strip() == _NAME:
            if not fields["State"].strip().startswith("S"):
                return None
            sample[task.name] = fields["voluntary_ctxt_switches"] + fields["nonvoluntary_ctxt_switches"]
    return sample
