"""Waiting times between attempts."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
from shoal_common import backoff
from shoal_common.backoff import Backoff
from shoal_common.errors import UnavailableError


def test_waits_double_up_to_a_maximum_and_start_over_after_a_success(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backoff._CHANCE, "uniform", lambda low, high: high)
    waits = Backoff(first_s=0.1, longest_s=0.5)
    assert [waits.next_s() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    waits.reset()
    assert waits.next_s() == 0.1


def test_waits_are_spread_over_their_upper_half() -> None:
    waits = [Backoff(first_s=1.0, longest_s=1.0).next_s() for _ in range(100)]
    assert all(0.5 <= wait <= 1.0 for wait in waits)
    assert len(set(waits)) > 1


def test_retry_hint_of_a_refusal_is_respected() -> None:
    busy = UnavailableError("busy", retry_after=timedelta(seconds=3))
    waits = [Backoff(longest_s=1.0).next_s(busy) for _ in range(100)]
    assert all(3.0 <= wait <= 3.75 for wait in waits)
    assert len(set(waits)) > 1
    assert Backoff(longest_s=1.0).next_s(UnavailableError("away")) <= 0.05
    assert Backoff(first_s=9.0, longest_s=9.0).next_s(busy) >= 4.5, (
        "a longer wait of the backoff itself is kept"
    )


def test_wait_does_not_touch_the_scripts_random_numbers() -> None:
    random.seed(7)
    expected = [random.random() for _ in range(3)]
    random.seed(7)
    busy = UnavailableError("busy", retry_after=timedelta(seconds=3))
    found = []
    for failure in (None, busy, None):
        Backoff(longest_s=1.0).next_s(failure)
        found.append(random.random())
    assert found == expected
