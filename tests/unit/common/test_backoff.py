"""How long to wait before something is tried again."""

from __future__ import annotations

import pytest
from shoal_common import backoff
from shoal_common.backoff import Backoff


def test_waits_double_up_to_the_longest_and_begin_anew_after_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff.random, "uniform", lambda low, high: high)
    waits = Backoff(first_s=0.1, longest_s=0.5)
    assert [waits.next_s() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    waits.reset()
    assert waits.next_s() == 0.1


def test_waits_are_spread_over_their_upper_half() -> None:
    waits = [Backoff(first_s=1.0, longest_s=1.0).next_s() for _ in range(100)]
    assert all(0.5 <= wait <= 1.0 for wait in waits)
    assert len(set(waits)) > 1
