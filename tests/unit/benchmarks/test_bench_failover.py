"""Table T11 (failover of a parameter server): pauses read from step logs, an account of lost and
repeated pushes, and the rows of the table."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from benchmarks.errors import MeasurementError
from benchmarks.server_failover import STEPS_AROUND, Pause, System, pause_of, row, verdict
from benchmarks.workers.steplog import Commit
from benchmarks.workers.tally import OPTIMIZER_GROUP, Account, account

MS = 1_000_000


def commits(steps_ms: Sequence[float]) -> list[Commit]:
    moments = [sum(steps_ms[: number + 1]) for number in range(len(steps_ms))]
    return [Commit(round(moment * MS), 1, 2, 0, number) for number, moment in enumerate(moments)]


# the first steps are not ordinary ones
BEFORE = commits([*[50] * (2 * STEPS_AROUND), *[10] * STEPS_AROUND])


def test_pause_is_the_longest_gap_between_steps_after_the_kill_minus_the_median_before() -> None:
    killed_ns = BEFORE[-1].time_ns + 3 * MS
    after = commits([BEFORE[-1].time_ns / MS + 12, 10, 210, *[10] * STEPS_AROUND, 30])
    pause = pause_of([*BEFORE, *after], killed_ns)
    assert pause.first_s == pause.longest_s == pytest.approx(0.2)
    assert pause.later_s == pytest.approx(0.02)
    assert pause.step_s == pytest.approx(0.01)


def test_pause_of_the_first_step_starts_at_the_last_one_before_the_kill() -> None:
    killed_ns = BEFORE[-1].time_ns + 3 * MS
    after = commits([BEFORE[-1].time_ns / MS + 310, *[10] * STEPS_AROUND])
    assert pause_of([*BEFORE, *after], killed_ns).longest_s == pytest.approx(0.3)


def test_a_pause_while_the_new_backup_catches_up_counts_too() -> None:
    after = commits([BEFORE[-1].time_ns / MS + 110, *[10] * STEPS_AROUND, 510])
    pause = pause_of([*BEFORE, *after], BEFORE[-1].time_ns + 3 * MS)
    assert (pause.first_s, pause.later_s, pause.longest_s) == (
        pytest.approx(0.1),
        pytest.approx(0.5),
        pytest.approx(0.5),
    )


def test_pause_requires_steps_before_and_after_the_kill() -> None:
    whole = commits([10.0] * (2 * STEPS_AROUND + 2))
    with pytest.raises(
        MeasurementError,
        match=f"{STEPS_AROUND - 1} steps before the kill and {STEPS_AROUND + 2} after it",
    ):
        pause_of(whole, whole[STEPS_AROUND - 1].time_ns)
    with pytest.raises(MeasurementError, match=f"and {STEPS_AROUND} after it"):
        pause_of(whole, whole[STEPS_AROUND + 1].time_ns)


def test_tally_element_decreases_by_one_for_each_applied_push() -> None:
    model, tally = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(2, 1000))
    optimizer = torch.optim.Adam(
        [{"params": [model]}, {"params": [tally], **OPTIMIZER_GROUP}], lr=1e-3
    )
    for pushed in [*range(1000), 7, 7, 999]:
        optimizer.zero_grad()
        (model.sum() + tally[1, pushed]).backward()
        optimizer.step()
    assert tally[0].tolist() == [0.0] * 1000
    assert tally[1].tolist() == [
        -3.0 if pushed == 7 else -2.0 if pushed == 999 else -1.0 for pushed in range(1000)
    ]


def test_pushes_applied_exactly_once_are_neither_lost_nor_duplicated() -> None:
    assert account([[-1.0] * 3, [-1.0] * 2], [3, 2], [6, 6]) == Account(
        acknowledged=5, lost=0, twice=0
    )


def test_lost_push_and_duplicate_push_do_not_cancel_out() -> None:
    assert account([[-1.0, 0.0, -2.0], [-1.0] * 2], [3, 2], [6, 6]) == Account(
        acknowledged=5, lost=1, twice=1
    )


def test_pushes_lost_at_the_end_are_counted_although_their_zeros_are_omitted() -> None:
    assert account([[-1.0], [-1.0] * 2], [3, 2], [4, 4]) == Account(acknowledged=5, lost=2, twice=0)


def test_applied_but_unacknowledged_push_counts_as_one_too_many() -> None:
    assert account([[-1.0] * 4, [-1.0] * 2], [3, 2], [7, 7]) == Account(
        acknowledged=5, lost=0, twice=1
    )


def test_partitions_without_a_tally_are_judged_by_their_versions() -> None:
    assert account([[-1.0] * 3], [3], [4, 2]) == Account(acknowledged=3, lost=2, twice=0)
    assert account([[-1.0] * 3], [3], [4, 5]) == Account(acknowledged=3, lost=0, twice=1)


def measured(name: str, pauses_s: Sequence[float], *, lost: int = 0) -> System:
    pushes = Account(acknowledged=100, lost=lost, twice=0)
    pauses = [Pause(first_s=longest_s, later_s=0.02, step_s=0.01) for longest_s in pauses_s]
    return System(name=name, backups=1, kills=2, pauses=pauses, pushes=pushes)


def test_a_row_has_a_pause_for_each_worker_and_kill_and_is_compared_with_a_restart() -> None:
    backed, restarted = (
        measured("with a backup", [0.1, 0.2, 0.2, 0.3]),
        measured("without", [2.0] * 4),
    )
    cells = row(backed, restarted).cells
    assert (cells["kills"], cells["p50 s"], cells["max s"], cells["p50, of a restart"]) == (
        "2",
        "0.200",
        "0.300",
        "0.100",
    )
    assert (cells["step s"], cells["first, max s"], cells["later, max s"]) == (
        "0.010",
        "0.300",
        "0.020",
    )
    assert (cells["pushes"], cells["lost"], cells["twice"]) == ("100", "0", "0")
    assert "p50, of a restart" not in row(restarted, restarted).cells


def test_verdict_states_whether_pause_and_pushes_reached_the_target() -> None:
    assert verdict(measured("", [0.4])) == (
        "Measured: p99 0.400 s (reached), 0.50 x the paper's pause; of 100 acknowledged pushes 0 "
        "lost, 0 twice (reached)."
    )
    assert "p99 0.600 s (not reached), 0.75 x" in verdict(measured("", [0.6], lost=1))
    assert "1 lost, 0 twice (not reached)" in verdict(measured("", [0.6], lost=1))
    assert verdict(System(name="", backups=1, kills=2, failure="no coordinator")) == "Not measured."
