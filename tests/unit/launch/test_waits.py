"""Names for what the start of a run is waiting for."""

from __future__ import annotations

from typing import Any

import pytest
from shoal.launcher.run.waits import PLAIN_AFTER_S, awaited

STARTED: dict[str, Any] = {
    "checking": False,
    "importing": False,
    "open_": True,
    "workers": 3,
    "started": 3,
    "joined": 0,
    "seconds": 40.0,
}


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"started": 0, "importing": True}, "torch to be imported"),
        (
            {"started": 0, "importing": True, "open_": False},
            "torch to be imported and the coordinator",
        ),
        ({"started": 0, "checking": True}, "the health checks of this machine"),
        ({"started": 0}, "the workers to start"),
        ({"joined": 1}, "2 of 3 workers to join"),
        ({"joined": 1, "open_": False}, "the coordinator and 2 of 3 workers to join"),
        ({"joined": 3}, "the first step"),
        ({}, "3 of 3 workers to join (they may still be importing packages)"),
        (
            {"seconds": 130.0},
            "3 of 3 workers to join (a script that does not use Shoal never joins)",
        ),
        ({"seconds": PLAIN_AFTER_S}, ""),  # a plain script
    ],
)
def test_slow_start_names_what_it_waits_for(state: dict[str, Any], expected: str) -> None:
    assert awaited(**{**STARTED, **state}) == expected
