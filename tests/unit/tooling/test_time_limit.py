"""No test starts after the time limit of a run."""

from __future__ import annotations

import time

import pytest

from tests import time_limit


def test_tests_are_skipped_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(time_limit.VARIABLE, raising=False)
    time_limit.skip_if_over()
    monkeypatch.setenv(time_limit.VARIABLE, str(time.time() + 60))
    time_limit.skip_if_over()
    monkeypatch.setenv(time_limit.VARIABLE, str(time.time() - 1))
    with pytest.raises(pytest.skip.Exception, match=r"time that \.ci/run gives"):
        time_limit.skip_if_over()
