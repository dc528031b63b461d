"""How scripts of these tests wait for a test that holds their run (cluster.Cluster.held)."""

from __future__ import annotations

import time
from pathlib import Path


def pace(hold: Path, step: int, steps: int) -> None:
    """Before each of `steps` steps of a run: steps are slow while `hold` exists, and slower towards the run's end, so that what the test
    waits for happens before that also on a busy machine. They must go on: members come and go between them."""
    slowness_s = 0.15 if 3 * step < steps else 0.6 if 3 * step < 2 * steps else 3.0
    over = time.monotonic() + slowness_s
    while hold.exists() and time.monotonic() < over:
        time.sleep(0.01)  # a file tells nobody that it is gone
