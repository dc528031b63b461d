"""Table T12 (announcements of generations): its verdict and its rows."""

from __future__ import annotations

from benchmarks.announcing import Measured, _row, _verdict


def measured(
    kind: str,
    members: int,
    *,
    joined_s: float,
    last_s: float,
    message_bytes: float = 83.0,
    failure: str = "",
) -> Measured:
    found = Measured(
        name=f"{kind}, {members} members",
        members=members,
        command="c",
        joined_s=joined_s,
        failure=failure,
    )
    found.delays_s, found.last_s, found.message_bytes = (
        [last_s / 2, last_s],
        [last_s],
        message_bytes,
    )
    return found


def test_verdict_compares_each_figure_with_its_target_and_the_floor() -> None:
    verdict = _verdict(
        [
            measured("coordinator", 2000, joined_s=1.0, last_s=0.09),
            measured("bare grpcio", 2000, joined_s=0.5, last_s=0.06),
            measured("coordinator", 10_000, joined_s=6.0, last_s=0.5),
        ]
    )
    assert verdict == (
        "10 000 joins 6.0 s (not reached); the last of 2000 informed after 90 ms, bare grpcio 60 "
        "ms (reached); 83 bytes per member per change (reached)."
    )


def test_failed_or_unmeasured_figures_are_not_judged() -> None:
    assert _verdict(
        [measured("coordinator", 10_000, joined_s=1.0, last_s=0.1, failure="it did not start")]
    ) == ("Not measured at the target's sizes.")


def test_row_has_the_available_figures() -> None:
    row = _row(measured("bare grpcio", 100, joined_s=0.25, last_s=0.01))
    assert row.cells["joined, s"] == "0.25"
    assert row.cells["last, ms"] == "10 (at most 10)"
    assert "heartbeats/s" not in row.cells
    assert _row(measured("coordinator", 100, joined_s=0, last_s=0, failure="why")).failure == "why"
