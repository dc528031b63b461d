"""A time limit for a whole run of tests. `.ci/run` sets it for `make test-slow`, so that CI ends in
time on a slow machine too, and reports what it has not run."""

from __future__ import annotations

import os
import time
from typing import Final

import pytest

VARIABLE: Final = "TESTS_END_AT"
"""Environment variable with the time after which no test starts, in seconds since the epoch."""


def skip_if_over() -> None:
    """Skips the current test if the time of the run is over."""
    end = os.environ.get(VARIABLE)
    if end and time.time() > float(end):
        pytest.skip("not run: the time that .ci/run gives to make test-slow is over")
