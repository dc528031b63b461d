"""Slows or holds scripts whose run a test controls (cluster.Cluster.held)."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from tests.zygote.children import PATIENCE_S


def pace(hold: Path, step: int, steps: int) -> None:
    """Waits before a step of a run of `steps` steps, while the file `hold` exists. Waits are longer
    towards the run's end, so that the event awaited by the test occurs in time on a busy machine
    too. Steps are slow rather than held, because members can join and leave only between steps.

    If `hold` contains a number, the run is held before that step and the other steps run at full
    speed: for tests in which no member joins or leaves meanwhile.
    """
    stands_at = _number_in(hold)
    if stands_at is None:
        longest_s = 0.15 if 3 * step < steps else 0.6 if 3 * step < 2 * steps else 3.0
    else:
        longest_s = PATIENCE_S if step == stands_at else 0.0
    over = time.monotonic() + longest_s
    while hold.exists() and time.monotonic() < over:
        time.sleep(0.01)  # there is no event for the removal of a file


def _number_in(hold: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # the file is gone, or empty
        return int(hold.read_text())
    return None
