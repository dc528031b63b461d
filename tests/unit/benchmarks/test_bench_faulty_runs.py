"""The benchmark reads the simulator's account of its runs."""

from __future__ import annotations

import pytest

from benchmarks.errors import MeasurementError
from benchmarks.faulty_runs import account_of, described, verdict


def test_account_without_failures_is_bitwise_equal() -> None:
    account = account_of(
        "\n10000 schedules in 16.2 min, 310 a minute in each of 2 processes\nwrong: 0\n"
    )
    assert (account.schedules, account.bitwise, account.per_minute, account.wrong) == (
        10_000,
        10_000,
        310,
        {},
    )
    assert (
        verdict([described("seeds", "", account)])
        == "Measured: seeds: 10000 of 10000 bitwise (reached), 310 a minute (reached)."
    )


def test_failures_are_counted_by_kind_of_difference() -> None:
    output = (
        "--- parameters\nseed 28:\n\n30 schedules in 0.9 min, 34 a minute in each of 1 "
        "processes\nwrong: {'parameters': 2, 'samples': 1}\n"
    )
    row = described("seeds", "", account_of(output))
    assert (row.cells["bitwise"], row.cells["wrong"]) == ("27", "2 parameters, 1 samples")
    assert "27 of 30 bitwise (not reached), 34 a minute (not reached)" in verdict([row])


def test_a_simulator_that_ends_without_an_account_is_a_failure() -> None:
    with pytest.raises(
        MeasurementError, match="no account of its runs and ended with: No module named tests"
    ):
        account_of("a beginning\nNo module named tests\n")
