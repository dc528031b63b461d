"""The benchmark of joins reads from step logs how long a join stalled the survivors, and from
workers' logs how fast the state was transferred."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.errors import MeasurementError
from benchmarks.join_stall import Joins, allowed_s, row
from benchmarks.joining import STEPS_AROUND, members, stall_s, taken
from benchmarks.processes import REPOSITORY
from benchmarks.workers.steplog import Commit

MS = 1_000_000
TAKE = REPOSITORY / "worker" / "shoal_worker" / "elastic" / "group" / "transfer.py"


def commits(
    steps_ms: Sequence[float], *, world_size: int, begins_ms: float = 0, rank: int = 0
) -> list[Commit]:
    moments = [begins_ms + sum(steps_ms[: number + 1]) for number in range(len(steps_ms))]
    return [
        Commit(round(moment * MS), 1, world_size, rank, number)
        for number, moment in enumerate(moments)
    ]


def test_stall_is_the_step_that_admitted_the_joiner_minus_the_median() -> None:
    alone = commits([500, 10, 10, 10], world_size=2)  # the first duration is the pause at the death
    together = commits([210, *[10] * STEPS_AROUND], world_size=3, begins_ms=530)
    stall, median = stall_s([*alone, *together], workers=3)
    assert stall == pytest.approx(0.2)
    assert median == pytest.approx(0.01)


def test_steps_far_from_the_join_do_not_count() -> None:
    alone = commits([10, 900, *[10] * STEPS_AROUND], world_size=2)
    together = commits(
        [30, *[10] * STEPS_AROUND, 700], world_size=3, begins_ms=alone[-1].time_ns / MS
    )
    assert stall_s([*alone, *together], workers=3)[0] == pytest.approx(0.02)


def test_join_that_coincides_with_the_death_is_not_measured() -> None:
    with pytest.raises(
        MeasurementError, match="no step of the survivors lies between the death and the join"
    ):
        stall_s(commits([10] * 20, world_size=3), workers=3)


def test_group_is_complete_once_all_have_taken_enough_steps_together_since_the_kill() -> None:
    steps = [10.0] * (STEPS_AROUND + 1)
    gone = commits([10.0] * 3, world_size=3, rank=1)
    logs = {
        pid: commits(steps, world_size=3, rank=rank, begins_ms=100)
        for rank, pid in ((2, 11), (0, 12), (1, 13))
    } | {10: gone}
    assert members(logs, workers=3, since_ns=20 * MS) == [12, 13, 11]
    assert members(logs, workers=3, since_ns=115 * MS) == []
    logs[13] = commits(steps, world_size=2, rank=1, begins_ms=100)
    assert members(logs, workers=3, since_ns=20 * MS) == []


def test_joiners_log_of_its_state_transfer_is_parsed_as_bytes_and_seconds() -> None:
    says = (
        "INFO worker shoal_worker.elastic.group.transfer received 805.3 MB of state from 2 "
        "donor(s) in 1.250 s\n"
    )
    assert taken(f"[2] {says}other\n[0] {says}") == [(805.3e6, 1.25)] * 2
    assert '"received %.1f MB of state from %d donor(s) in %.3f s"' in Path(TAKE).read_text(), (
        "the benchmark parses this log line: change both together"
    )


def test_a_row_compares_stall_and_rate_with_raw_tcp() -> None:
    joins = Joins(stalls_s=[0.5, 0.7, 0.6], steps_s=[0.1] * 3, transfers=[(1e9, 1.0)] * 3)
    cells = row("shoal", "shoal run", 1.4e9, joins, 2e9).cells
    assert allowed_s(1.4e9, 2e9) == pytest.approx(1.2)
    assert (cells["stall s"], cells["allowed s"], cells["x raw TCP"]) == ("0.60", "1.20", "0.50")
