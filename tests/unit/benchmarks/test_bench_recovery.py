"""The benchmark reads from step logs when all workers are training and when they have recovered."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.kill_recovery import of_floor, verdict, with_share
from benchmarks.recovery import SETTLED_STEPS, Recovery
from benchmarks.report import Row
from benchmarks.workers.steplog import Commit, StepLogs

WORKERS = (101, 102, 103)


def log(
    directory: Path, pid: int, *, group: int, world_size: int, rank: int, times_ns: list[int]
) -> None:
    with (directory / f"{pid}.steps").open("a") as file:
        for step, moment in enumerate(times_ns):
            file.write(f"{moment} {group} {world_size} {rank} {step}\n")


@pytest.fixture
def killed(tmp_path: Path) -> tuple[Recovery, int]:
    """Three workers in group 1, of which rank 1 was killed, and the time of the kill."""
    now = time.monotonic_ns()
    for rank, pid in enumerate(WORKERS):
        log(tmp_path, pid, group=1, world_size=3, rank=rank, times_ns=[now] * SETTLED_STEPS)
    recovery = Recovery(StepLogs(tmp_path), workers=3, recovered=2, restarted=False)
    assert recovery.settled()
    assert recovery.members == list(WORKERS)
    recovery.killed(WORKERS[1], at_ns=now)
    return recovery, now


def test_group_is_incomplete_until_each_worker_has_taken_enough_steps_in_it(
    tmp_path: Path,
) -> None:
    now = time.monotonic_ns()
    recovery = Recovery(StepLogs(tmp_path), workers=2, recovered=1, restarted=False)
    log(tmp_path, 101, group=2, world_size=2, rank=0, times_ns=[now] * SETTLED_STEPS)
    assert not recovery.settled()
    log(tmp_path, 102, group=2, world_size=2, rank=1, times_ns=[now] * (SETTLED_STEPS - 1))
    assert not recovery.settled()
    log(tmp_path, 102, group=2, world_size=2, rank=1, times_ns=[now])
    assert recovery.settled()


def test_recovery_is_over_when_the_last_survivor_has_stepped_in_a_newer_group(
    tmp_path: Path, killed: tuple[Recovery, int]
) -> None:
    recovery, at_ns = killed
    log(
        tmp_path,
        WORKERS[0],
        group=2,
        world_size=2,
        rank=0,
        times_ns=[at_ns + 40_000_000, at_ns + 50_000_000],
    )
    assert not recovery.over()
    log(tmp_path, WORKERS[2], group=2, world_size=2, rank=1, times_ns=[at_ns + 70_000_000])
    assert recovery.over()
    assert recovery.pause_s == pytest.approx(0.070)


def test_step_finished_by_the_old_group_after_the_kill_is_not_a_recovery(
    tmp_path: Path, killed: tuple[Recovery, int]
) -> None:
    recovery, at_ns = killed
    for rank in (0, 2):
        log(tmp_path, WORKERS[rank], group=1, world_size=3, rank=rank, times_ns=[at_ns + 1_000_000])
    assert not recovery.over()


def test_replacements_do_not_count_where_survivors_continue(
    tmp_path: Path, killed: tuple[Recovery, int]
) -> None:
    recovery, at_ns = killed
    log(tmp_path, WORKERS[0], group=2, world_size=2, rank=0, times_ns=[at_ns + 40_000_000])
    log(tmp_path, 104, group=3, world_size=3, rank=2, times_ns=[at_ns + 60_000_000])
    assert not recovery.over()


def test_new_processes_count_where_all_restart(tmp_path: Path) -> None:
    now = time.monotonic_ns()
    for rank, pid in enumerate(WORKERS):
        log(tmp_path, pid, group=0, world_size=3, rank=rank, times_ns=[now] * SETTLED_STEPS)
    recovery = Recovery(StepLogs(tmp_path), workers=3, recovered=3, restarted=True)
    assert recovery.settled()
    recovery.killed(WORKERS[0], at_ns=now)
    for rank in range(3):
        assert not recovery.over()
        log(
            tmp_path,
            200 + rank,
            group=0,
            world_size=3,
            rank=rank,
            times_ns=[now + 5_000_000_000 + rank],
        )
    assert recovery.over()
    assert recovery.pause_s == pytest.approx(5.0)


def test_line_torn_by_a_kill_is_skipped_until_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "101.steps"
    file.write_text("5 1 3 0 7\n6 1 3")
    logs = StepLogs(tmp_path)
    logs.read()
    assert logs.commits == {101: [Commit(5, 1, 3, 0, 7)]}
    with file.open("a") as stream:
        stream.write(" 0 8\n")
    logs.read()
    assert logs.commits[101][-1] == Commit(6, 1, 3, 0, 8)


def test_a_pause_is_compared_with_the_floor_by_their_medians() -> None:
    ours, floor = (
        Row(name=name, command="", cells={}, samples={"pause_s": s})
        for name, s in (("a", [0.1, 0.3, 0.2]), ("b", [0.1]))
    )
    assert of_floor(ours, floor) == pytest.approx(2.0)
    assert with_share(ours, of_floor(ours, floor)).cells == {"p50, of floor": "2.00"}
    assert of_floor(ours, Row(name="b", command="", cells={}, samples={"pause_s": []})) is None


def test_the_verdict_names_each_row_that_has_a_target() -> None:
    text = verdict(
        [
            ("shoal", 1.3, 1.4),
            ("shoal, 8 ranks", 2.5, 2.0),
            ("shoal, fsdp", None, 2.0),
            ("a peer", 4.0, None),
        ]
    )
    assert (
        text == "Measured: p50 divided by the floor's p50: shoal 1.30 x (reached); shoal, 8 ranks "
        "2.50 x (not reached); shoal, fsdp not measured."
    )
