"""The table of late writes, computed from the results of its rounds."""

from __future__ import annotations

from typing import Any

from benchmarks.late_writes import TIMEOUT_S, described, verdict


def one_round(**found: Any) -> dict[str, Any]:
    return {
        "in_flight": 1,
        "changed": 0,
        "next_s": 0.01,
        "failures": [],
        "silent": False,
        **found,
    }


def test_a_row_counts_rounds_that_changed_and_that_waited() -> None:
    row = described(
        "torch",
        "python",
        [
            one_round(changed=4000, silent=True),
            one_round(changed=1),
            one_round(next_s=TIMEOUT_S),
            one_round(failures=["timed out"]),
        ],
    )
    assert {name: row.cells[name] for name in ("rounds", "changed", "silent", "waited")} == {
        "rounds": "4",
        "changed": "2",
        "silent": "1",
        "waited": "2",
    }
    assert row.samples["changed"] == [4000, 1, 0, 0]


def test_verdict_is_reached_if_no_round_changed_or_waited() -> None:
    good = described("good", "python", [one_round()])
    late = described("late", "python", [one_round(changed=1)])
    slow = described("slow", "python", [one_round(next_s=TIMEOUT_S)])
    assert verdict([good, late, slow]) == (
        "Measured: good 0 and 0 of 1 (reached); late 1 and 0 of 1 (not reached); slow 0 and 1 of 1 "
        "(not reached)."
    )
    assert verdict([]) == "Measured: nothing."
