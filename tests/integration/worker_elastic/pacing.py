"""Waits of scripts for a test that holds their run (cluster.Cluster.held)."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from tests.zygote.children import PATIENCE_S


def pace(hold: Path, step: int, steps: int) -> None:
    """Before each of `steps` steps of a run: steps are slow while `hold` exists, and slower towards
    the run's end, so that what the test waits for happens before that also on a busy machine. They
    must go on: members come and go between them.

    Where `hold` has a number in it, the run stands before the step of that number, and other steps
    are as quick as ever: for tests in which no member comes or goes meanwhile.
    """
    stands_at = _number_in(hold)
    if stands_at is None:
        longest_s = 0.15 if 3 * step < steps else 0.6 if 3 * step < 2 * steps else 3.0
    else:
        longest_s = PATIENCE_S if step == stands_at else 0.0
    over = time.monotonic() + longest_s
    while hold.exists() and time.monotonic() < over:
        time.sleep(0.01)  # a file tells nobody that it is gone


def _number_in(hold: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # it is gone, or empty
        return int(hold.read_text())
    return None
