"""T17: the schedule of faults, the account of samples and steps, and the table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest

from benchmarks.failures.account import Account, account, reached, reduced_s
from benchmarks.failures.injector import Injector
from benchmarks.failures.runs import Run
from benchmarks.failures.schedule import Fault, Schedule
from benchmarks.failures.table import Candidate, Measured, interval, row, verdict
from benchmarks.workers.failures.ledger import Attempt, Entries, Ledger, Ledgers

SCHEDULE = Schedule(mean_gap_s=6, shortest_gap_s=3, longest_absence_s=2)


def attempt(
    step: int, samples: list[int], *, group: int = 1, at: int | None = None, world_size: int = 2
) -> Attempt:
    """`at`: when it was committed; None: not."""
    return Attempt(group=group, world_size=world_size, step=step, samples=samples, committed_ns=at)


def entries(*attempts: Attempt, digest: str = "") -> Entries:
    return Entries(started_ns=1, attempts=list(attempts), digest=digest)


# --- the schedule


def test_seed_determines_the_faults() -> None:
    first, second = (list(islice(SCHEDULE.faults(), 50)) for _ in range(2))
    assert first == second
    assert first != list(islice(replace(SCHEDULE, seed=1).faults(), 50))


def test_an_absence_ends_before_the_next_kill() -> None:
    faults = list(islice(SCHEDULE.faults(), 500))
    assert faults[0].at_s >= SCHEDULE.shortest_gap_s
    for before, after in pairwise(faults):
        assert after.at_s >= before.at_s + SCHEDULE.shortest_gap_s
        assert 0.2 <= before.absent_s <= 2
        assert 0 <= before.victim < 1
    assert faults[-1].at_s / 500 == pytest.approx(SCHEDULE.mean_gap_s, rel=0.1)


def test_a_slower_machine_gets_the_same_faults_further_apart() -> None:
    fast, slow = (list(islice(each.faults(), 9)) for each in (SCHEDULE, SCHEDULE.slowed(4)))
    for before, after in zip(fast, slow, strict=True):
        assert after.at_s == pytest.approx(4 * before.at_s)
        assert after.absent_s == pytest.approx(4 * before.absent_s)
        assert after.victim == before.victim


def test_overlapping_absences_are_refused() -> None:
    with pytest.raises(ValueError, match=r"absences up to 4 s, gaps from 3 s and 6 s on average"):
        replace(SCHEDULE, longest_absence_s=4)


# --- the account


def test_each_sample_of_a_run_without_faults_counts_once() -> None:
    ranks = [
        entries(attempt(1, [0], at=10), attempt(2, [2], at=20), digest="d"),
        entries(attempt(1, [1], at=11), attempt(2, [3], at=21), digest="d"),
    ]
    assert account(ranks, steps=2, samples=4) == Account(
        never=0, twice=0, redone=0, digests=frozenset({"d"})
    )
    assert reached(ranks) == [(10, 1), (20, 2)]


def test_samples_of_a_victim_count_if_the_others_committed_its_step() -> None:
    victim = entries(attempt(1, [1], at=11), attempt(2, [3]))  # killed before it noted the commit
    survivor = entries(attempt(1, [0], at=10), attempt(2, [2], at=20), digest="d")
    assert account([victim, survivor], steps=2, samples=4).never == 0


def test_aborted_step_counts_once_when_it_is_taken_again() -> None:
    victim = entries(attempt(1, [1]))
    survivor = entries(attempt(1, [0]), attempt(1, [0, 1], group=2, at=10, world_size=1))
    assert account([victim, survivor], steps=1, samples=2) == Account(
        never=0, twice=0, redone=1, digests=frozenset()
    )


def test_steps_after_a_checkpoint_are_redone_and_not_doubled() -> None:
    killed = entries(*(attempt(step, [step], at=10 * step) for step in (1, 2, 3)))
    # started again from the checkpoint of step 1
    again = entries(*(attempt(step, [step], group=2, at=100 * step) for step in (2, 3, 4)))
    assert account([killed, again], steps=4, samples=5) == Account(
        never=1, twice=0, redone=2, digests=frozenset()
    )
    assert [step for _, step in reached([killed, again])] == [1, 2, 3, 2, 3, 4]


def test_a_step_that_one_process_committed_twice_doubles_its_samples() -> None:
    process = entries(attempt(1, [0, 1], at=10), attempt(1, [0, 1], group=2, at=20))
    assert account([process], steps=1, samples=2).twice == 2


def test_share_that_no_worker_took_is_never_trained() -> None:
    alone = entries(attempt(1, [0], at=10))
    assert account([alone], steps=1, samples=2).never == 1


def test_workers_whose_parameters_differ_have_two_digests() -> None:
    assert len(account([entries(digest="a"), entries(digest="b")], steps=0, samples=0).digests) == 2


def test_strength_is_reduced_until_a_newer_group_of_all_has_taken_a_step() -> None:
    survivor = entries(
        attempt(1, [], at=1_000),
        attempt(2, [], at=3_000, group=1),  # of the old group, after the kill
        attempt(3, [], at=4_000, group=2, world_size=1),
        attempt(4, [], at=6_000, group=3),
        attempt(5, [], at=9_000, group=4, world_size=1),
    )
    assert reduced_s([survivor], [2_000], ranks=2, end_ns=9_000) == pytest.approx(4e-6)
    # a second kill before that counts the time once; the last one lasts until the end
    assert reduced_s([survivor], [2_000, 5_000, 8_000], ranks=2, end_ns=9_000) == pytest.approx(
        5e-6
    )


# --- the ledger


def test_parts_of_a_step_add_up_and_a_torn_line_is_skipped(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for samples in ([], [1, 2], [3]):
        ledger.tried(group=1, world_size=2, step=1, samples=samples)
    ledger.committed()
    ledger.tried(group=1, world_size=2, step=2, samples=[4])
    with (tmp_path / f"{os.getpid()}.ledger").open("a") as file:
        file.write(json.dumps({"kind": "committed", "time_ns": 5})[:-3])
    ledgers = Ledgers(tmp_path)
    for _ in range(2):  # nothing is read twice
        ledgers.read()
        first, second = ledgers.of[os.getpid()].attempts
        assert (first.samples, first.committed_ns is not None) == ([1, 2, 3], True)
        assert (second.samples, second.committed_ns) == ([4], None)


# --- the injector


class Sleepers:
    """Workers that do nothing; the test writes their ledgers."""

    def __init__(self, directory: Path, count: int) -> None:
        self.directory = directory
        self.processes = [subprocess.Popen(["sleep", "600"]) for _ in range(count)]
        self.replaced = 0
        for process in self.processes:
            self.write(process.pid, kind="started")

    def write(self, pid: int, **fields: object) -> None:
        with (self.directory / f"{pid}.ledger").open("a") as file:
            file.write(json.dumps({"time_ns": time.monotonic_ns(), **fields}) + "\n")

    def take_step(self, pid: int, step: int) -> None:
        self.write(pid, kind="tried", group=1, world_size=2, step=step, samples=[])
        self.write(pid, kind="committed")

    def may_kill(self, pid: int) -> bool:
        return True

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        next(p for p in self.processes if p.pid == pid).wait()

    def replace(self) -> None:
        self.replaced += 1


@pytest.fixture
def sleepers(tmp_path: Path) -> Iterator[Sleepers]:
    made = Sleepers(tmp_path, 2)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


def injector_of(sleepers: Sleepers, *faults: Fault) -> Injector:
    return Injector(
        sleepers,
        Ledgers(sleepers.directory),
        absent=sleepers.directory / "absent",
        faults=iter(faults),
        ranks=2,
        steps=3,
    )


def test_fault_kills_one_worker_and_keeps_its_place_empty(sleepers: Sleepers) -> None:
    first, second = sleepers.processes
    injector = injector_of(
        sleepers,
        Fault(at_s=0, victim=0.9, absent_s=3600),
        Fault(at_s=0, victim=0, absent_s=0),
    )
    sleepers.take_step(first.pid, 1)
    assert not injector.over()
    assert not injector.begun_ns, "it began before all had taken a step"
    sleepers.take_step(second.pid, 1)
    assert not injector.over()
    assert injector.begun_ns
    for _ in range(3):  # the next fault waits for the end of the absence
        assert not injector.over()
    assert (first.poll(), second.poll()) == (None, -signal.SIGKILL)
    assert (sleepers.directory / "absent").exists()
    assert (len(injector.kills_ns), injector.returns_ns, sleepers.replaced) == (1, [], 1)


def test_an_absence_ends_when_it_is_due(sleepers: Sleepers) -> None:
    injector = injector_of(sleepers, Fault(at_s=0, victim=0, absent_s=0))
    for process in sleepers.processes:
        sleepers.take_step(process.pid, 1)
    for _ in range(3):
        injector.over()
    assert not (sleepers.directory / "absent").exists()
    assert injector.returns_ns[0] >= injector.kills_ns[0]


def test_faults_end_with_the_last_step(sleepers: Sleepers) -> None:
    first, second = (process.pid for process in sleepers.processes)
    injector = injector_of(sleepers, Fault(at_s=0, victim=0, absent_s=0))
    for pid in (first, second):
        sleepers.take_step(pid, 3)
    assert not injector.over()
    sleepers.write(first, kind="finished", digest="d")
    assert not injector.over(), "the other has not finished yet"
    sleepers.write(second, kind="finished", digest="d")
    assert injector.over()
    assert not injector.kills_ns


# --- the table


def test_young_s_interval_balances_saving_and_redoing() -> None:
    assert interval(saving_s=0.02, step_s=0.01, mean_gap_s=4) == 40
    assert interval(saving_s=0.0, step_s=0.01, mean_gap_s=4) == 1


def run_of(time_s: float, *, never: int = 0, digest: str = "d", missing_s: float = 0) -> Run:
    return Run(
        time_s=time_s,
        progress=[(0.0, 1), (time_s, 2)],
        absences=[(1.0, 1.0 + 3 * missing_s)] if missing_s else [],
        missing_s=missing_s,
        reduced_s=1.5,
        account=Account(never=never, twice=0, redone=1, digests=frozenset({digest})),
        saved_s=[],
        launch_s=1.0,
    )


def measured(faulty: Run | None) -> Measured:
    candidate = Candidate(
        name="shoal, ddp", command="shoal", start=None, target=True, deterministic=True
    )  # type: ignore[arg-type] - nothing is started
    return Measured(
        name="gpt: shoal, ddp",
        command="shoal",
        candidate=candidate,
        without=run_of(10.0),
        faulty=faulty,
    )


def test_target_allows_for_missing_workers() -> None:
    within = measured(run_of(11.4, missing_s=1.0))
    assert row(within).cells["of allowed"] == "0.99"
    assert row(within).cells["same bits"] == "yes"
    assert "0.99 x (reached)" in verdict([within])
    assert "1.01 x (not reached)" in verdict([measured(run_of(11.6, missing_s=1.0))])


def test_lost_samples_and_different_bits_miss_the_target(subtests: pytest.Subtests) -> None:
    for run, text in (
        (run_of(10.0, never=3), "3 samples lost (not reached)"),
        (run_of(10.0, digest="other"), "other bits (not reached)"),
    ):
        with subtests.test(text):
            assert text in verdict([measured(run)])
    assert "not measured" in verdict([measured(None)])


@pytest.mark.slow
def test_a_run_with_kills_trains_every_sample_once_and_ends_with_the_same_bits() -> None:
    program = (
        "from benchmarks.failures.runs import Extent, run\n"
        "from benchmarks.failures.schedule import Fault\n"
        "from benchmarks.failures.table import candidates\n"
        "(ddp,) = (each for each in candidates(50) if each.name == 'shoal, ddp, deterministic')\n"
        "extent = Extent(model='gpt', ranks=3, batch=8, steps=100)\n"
        # one of three survives even where nothing recovers between the kills
        "kills = [Fault(at_s=at, victim=0.5, absent_s=0.1) for at in (0.2, 0.8)]\n"
        "for faults in ((), kills):\n"
        "    done = run(ddp.name, ddp.start, extent, faults)\n"
        "    print(len(done.absences), done.account.never, done.account.twice, done.digest)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert answer.returncode == 0, answer.stderr
    without, faulty = (line.split() for line in answer.stdout.splitlines())
    assert without[:3] == ["0", "0", "0"]
    assert int(faulty[0]) > 0
    assert faulty[1:] == ["0", "0", without[3]]
