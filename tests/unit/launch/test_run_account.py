"""A launcher computes pauses, figures and log lines from its workers' commits and the coordinator's
events."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from shoal.cli.terminal.live import LiveView
from shoal.launcher.processes.process import ExitStatus
from shoal.launcher.report.account import RunAccount, figures_lines
from shoal.launcher.report.course import Point, history_of, until_last_commit
from shoal.launcher.report.follower import RunFollower
from shoal.launcher.workers.output import Stream
from shoal_common.formats.tally import Counts, Tally, TallyWriter, read_tally
from shoal_worker.elastic.coordinator.progress import ProgressMeter
from shoal_worker.metrics import WorkerMetrics

MS = 1_000_000
BATCH = 96


@dataclass
class Clock:
    ns: int = 1_000 * MS

    def __call__(self) -> int:
        return self.ns


@dataclass(kw_only=True)
class Event:
    kind: str
    generation: int = 0
    member_id: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    event_id: str = "1"
    run: int = 1


class Run:
    """Workers that commit together, with 10 ms per step."""

    def __init__(self, directory) -> None:
        self.clock = Clock()
        self.directory = directory
        self.writers: dict[str, TallyWriter] = {}
        self.commits: dict[str, int] = {}
        self.before: dict[str, int] = {}
        self.account = RunAccount()

    def join(self, name: str, *, after: int = 0) -> None:
        self.writers[name] = TallyWriter(self.directory / name, clock_ns=self.clock)
        self.commits[name], self.before[name] = 0, after

    def steps(self, first: int, last: int, *names: str, generation: int) -> None:
        for step in range(first, last + 1):
            self.clock.ns += 10 * MS
            for name in names:
                self.commits[name] += 1
                counts = Counts(
                    commits=self.commits[name],
                    samples=step * BATCH,
                    samples_before=self.before[name] * BATCH,
                    steps_before=self.before[name],
                    steps_in_all=100,
                    losses=self.commits[name],
                    loss_sum=2.0 * self.commits[name],
                    loss=2.0,
                )
                self.writers[name].committed(counts, generation=generation, steps=step)

    def look(self, *, settle: bool = False) -> None:
        tallies = {
            name: tally
            for name in self.writers
            if (tally := read_tally(self.directory / name)) is not None
        }
        self.account.take(tallies, self.clock.ns, settle=settle)


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path)


FORMED = Event(kind="generation_formed", generation=1, attributes={"world_size": "2"})
LOST = Event(
    kind="member_lost",
    generation=1,
    member_id="b",
    attributes={
        "rank": "1",
        "who": "rank 1 (pid 7 on vm)",
        "detail": "its process ended with SIGKILL",
    },
)


def test_values_reported_by_workers_are_averaged_over_the_present_ones(
    run: Run,
) -> None:
    for name, accuracy in (("a", 0.5), ("b", 0.7)):
        run.join(name)
        run.writers[name].metrics([("accuracy", accuracy), ("lr", 0.1), ("nan", float("nan"))])
    run.steps(1, 20, "a", "b", generation=1)
    run.look()
    run.writers["a"].metrics([("accuracy", 0.9), ("lr", 0.1), ("\N{GREEK SMALL LETTER MU}", 1.0)])
    run.steps(21, 30, "a", generation=2)
    run.look()
    assert [point.metrics for point in run.account.figures.points] == [
        {"accuracy": pytest.approx(0.6), "lr": pytest.approx(0.1)},
        {"accuracy": 0.9, "lr": 0.1, "\N{GREEK SMALL LETTER MU}": 1.0},
    ]


def test_a_run_of_a_few_steps_has_points_for_the_status_page(run: Run) -> None:
    run.join("a")
    run.steps(1, 3, "a", generation=1)
    course = run.account.course
    assert history_of(course, ranks=1, now_ns=0, now_unix_ms=0) == []
    run.look()
    run.clock.ns += 1_000_000_000
    run.look(settle=True)
    assert len(course.points) == 2
    later_ns = course.last_ns + 5_000_000_000
    start, end = history_of(course, ranks=1, now_ns=later_ns, now_unix_ms=1_000_000)
    seconds = (course.last_ns - course.began_ns) / 1e9
    assert start == [pytest.approx(995_000 - 1000 * seconds, abs=2), 0, None, None, 1]
    assert end[:2] == [995_000, 3]
    assert end[2:] == [course.points[0].loss, course.points[0].samples_per_s, 1]


def test_loss_reported_after_the_last_step_belongs_to_the_last_point() -> None:
    def point(at_ns: int, loss: float, count: int) -> Point:
        return Point(
            at_ns=at_ns, steps=at_ns, samples=0, samples_per_s=at_ns, loss=loss, loss_count=count
        )

    nothing = point(7, float("nan"), 0)
    first, last = point(2, 4.0, 1), point(5, 3.0, 3)
    assert until_last_commit([first], 2) == [first]
    assert until_last_commit([first, last], 5) == [first, last]
    (kept, folded) = until_last_commit([first, last, nothing, point(8, 1.0, 1)], 4)
    assert kept == first
    assert (folded.at_ns, folded.loss, folded.loss_count, folded.samples_per_s) == (4, 2.5, 4, 5)


def test_loss_and_join_of_a_worker_are_reported_with_pauses_and_the_resumed_step(
    run: Run,
) -> None:
    for name in "ab":
        run.join(name)
    run.steps(1, 20, "a", "b", generation=1)
    run.look()
    run.clock.ns += 80 * MS
    run.steps(21, 30, "a", generation=2)
    run.join("c", after=30)
    run.clock.ns += 40 * MS
    run.steps(31, 50, "a", "c", generation=3)
    run.clock.ns += 500 * MS
    run.look()
    formed = Event(kind="generation_formed", generation=2, attributes={"world_size": "1"})
    joined = Event(
        kind="generation_formed",
        generation=3,
        attributes={"world_size": "2", "joined": "rank 1 (pid 9 on vm)"},
    )
    assert run.account.wants_events(run.clock.ns)
    lines = run.account.explain([FORMED, LOST, formed, joined], {}, run.clock.ns)
    assert lines == [
        "rank 1 (pid 7 on vm) ended with SIGKILL: training paused for 0.090 s and "
        "continued from step 20 with 1 rank",
        "rank 1 (pid 9 on vm) joined: training paused for 0.050 s and continued from step 30 "
        "with 2 ranks",
    ]
    figures = run.account.figures
    assert (figures.steps, figures.samples, figures.faults, figures.joins, figures.leaves) == (
        50,
        50 * BATCH,
        1,
        1,
        0,
    )
    assert figures.paused_s == pytest.approx(0.14)
    assert figures.longest_pause_s == pytest.approx(0.09)
    assert figures.lost_s == pytest.approx(0.12)  # the time without the regular steps of 10 ms
    assert figures_lines(figures) == [
        "50 steps, 4,800 samples in 0.6 s: 7,869 samples/s; loss 2",
        "1 fault, 1 join, 0 leaves: 2 pauses, 0.140 s in all, 0.090 s the longest; 0.120 s lost",
    ]


def test_cause_reported_after_the_loss_is_named(run: Run) -> None:
    for name in "ab":
        run.join(name)
    run.steps(1, 20, "a", "b", generation=1)
    run.clock.ns += 90 * MS
    run.steps(21, 40, "a", generation=2)
    run.look(settle=True)
    lost = replace(LOST, attributes={**LOST.attributes, "detail": "its session's stream broke"})
    exited = replace(LOST, kind="member_exited")
    formed = Event(kind="generation_formed", generation=2, attributes={"world_size": "1"})
    (line,) = run.account.explain([FORMED, lost, exited, formed], {}, run.clock.ns)
    assert line.startswith("rank 1 (pid 7 on vm) ended with SIGKILL: training paused")
    assert run.account.figures.faults == 1


def test_steps_repeated_after_a_return_to_a_checkpoint_count_once_and_as_lost_time(
    run: Run,
) -> None:
    for name in "ab":
        run.join(name)
    run.steps(1, 20, "a", "b", generation=1)
    run.clock.ns += 90 * MS
    run.steps(11, 40, "a", generation=2)
    run.look(settle=True)
    formed = Event(kind="generation_formed", generation=2, attributes={"world_size": "1"})
    (line,) = run.account.explain(
        [FORMED, LOST, formed], {"b": "ended with exit code 3"}, run.clock.ns
    )
    assert line == (
        "rank 1 (pid 7 on vm) ended with exit code 3: training paused for 0.100 s and "
        "continued from step 10 with 1 rank; 10 steps repeated"
    )
    figures = run.account.figures
    assert (figures.steps, figures.samples) == (40, 40 * BATCH)
    assert figures.lost_s == pytest.approx(0.09 + 0.1, abs=0.01)


def test_rank_in_doubt_of_a_step_does_not_make_it_count_twice(run: Run) -> None:
    for name in "ab":
        run.join(name)
    run.steps(1, 20, "a", "b", generation=1)
    run.steps(21, 21, "a", generation=1)
    run.clock.ns += 90 * MS
    run.steps(21, 21, "b", generation=2)
    run.steps(22, 30, "a", "b", generation=2)
    run.look(settle=True)
    (standstill,) = run.account.course.standstills
    assert (standstill.steps, standstill.undone) == (21, 0)
    assert run.account.figures.samples == 30 * BATCH


def test_evaluation_is_not_a_pause(run: Run) -> None:
    run.join("a")
    run.steps(1, 20, "a", generation=1)
    run.clock.ns += 3_000 * MS
    run.steps(21, 30, "a", generation=1)
    run.look(settle=True)
    assert run.account.explain([FORMED], {}, run.clock.ns) == []
    assert run.account.figures.pauses == ()
    assert run.account.status is not None
    assert run.account.status.left is not None
    assert run.account.status.left.total_seconds() == pytest.approx(0.7)  # 70 steps of 10 ms


def test_stall_explained_by_the_coordinator_is_a_pause_even_without_a_change_of_members(
    run: Run,
) -> None:
    run.join("a")
    run.steps(1, 4, "a", generation=1)
    run.look()
    run.clock.ns += 12_000 * MS
    stands = Event(
        kind="step_stands",
        generation=1,
        attributes={"reason": "rank 0 (vm) has waited 10 s in all_reduce for rank 1 (vm)"},
    )
    assert run.account.explain([FORMED, stands], {}, run.clock.ns) == []
    run.clock.ns += 8_000 * MS
    run.steps(5, 8, "a", generation=1)
    run.look(settle=True)
    (line,) = run.account.explain([], {}, run.clock.ns)
    assert (
        line == "rank 0 (vm) has waited 10 s in all_reduce for rank 1 (vm): training paused for "
        "20.010 s"
    )
    figures = run.account.figures
    assert (figures.faults, figures.longest_pause_s) == (0, pytest.approx(20.01))
    assert figures_lines(figures)[1].startswith(
        "0 faults, 0 joins, 0 leaves: 1 pause, 20.010 s in all"
    )


def test_ranks_that_leave_as_the_launcher_is_interrupted_do_not_count_as_leaves(run: Run) -> None:
    for name in "abc":
        run.join(name)
    run.steps(1, 20, "a", "b", "c", generation=1)

    def left(name: str) -> Event:
        return Event(
            kind="member_left",
            member_id=name,
            attributes={"rank": "1", "who": f"rank of {name}", "ending": "drained"},
        )

    def formed(generation: int) -> Event:
        return Event(
            kind="generation_formed", generation=generation, attributes={"world_size": "2"}
        )

    run.account.explain([FORMED, left("a"), formed(2)], {}, run.clock.ns)
    assert run.account.figures.leaves == 1  # a was drained by hand
    run.account.changes.interrupted = frozenset("bc")
    run.clock.ns += 50 * MS
    run.steps(21, 22, "c", generation=3)
    run.look(settle=True)
    lines = run.account.explain([left("b"), formed(3), left("c")], {}, run.clock.ns)
    assert not any("rank of b" in line or "ranks changed" in line for line in lines)
    assert run.account.figures.leaves == 1


def test_only_workers_running_when_the_signal_arrives_leave_because_of_it(run: Run) -> None:
    follower = RunFollower(note=lambda text: None)
    for name in "abc":
        follower.started(name, run.directory / name)
    follower.ended("a", ExitStatus(0))
    follower.interrupted()
    assert follower.account.changes.interrupted == {"b", "c"}


@pytest.mark.parametrize("notes_stalls", [False, True])
def test_stall_is_noted_if_the_log_of_the_first_worker_is_not_shown(
    run: Run, notes_stalls: bool
) -> None:
    noted: list[str] = []
    follower = RunFollower(note=noted.append, notes_stalls=notes_stalls)
    run.join("a")
    follower.started("a", run.directory / "a")
    run.steps(1, 2, "a", generation=1)
    follower.of_run(2)
    before = Event(kind="step_stands", attributes={"reason": "in an earlier run"})
    stands = Event(kind="step_stands", run=2, attributes={"reason": "rank 0 has waited 10 s"})

    async def ask(after: str) -> list[Event]:
        return [before, stands]

    asyncio.run(follower.finish(ask))
    assert noted == (["rank 0 has waited 10 s"] if notes_stalls else [])


def test_lost_server_is_reported_with_its_pause_soon_after_the_start(run: Run) -> None:
    run.join("a")
    run.steps(1, 2, "a", generation=1)
    run.look()
    run.clock.ns += 11_000 * MS
    lost = Event(kind="server_lost", attributes={"server_id": "server-0"})
    run.account.explain([FORMED, lost], {}, run.clock.ns)
    run.clock.ns += 9_000 * MS
    run.steps(3, 4, "a", generation=1)
    run.look(settle=True)
    assert run.account.explain([], {}, run.clock.ns) == [
        "parameter server server-0 was lost: training paused for 20.010 s"
    ]


def test_excluded_rank_counts_as_a_fault(run: Run) -> None:
    run.join("a")
    run.steps(1, 20, "a", generation=1)
    run.clock.ns += 30_000 * MS
    run.steps(21, 40, "a", generation=2)
    run.look(settle=True)
    attributes = {
        "rank": "1",
        "who": "rank 1 (pid 7 on vm)",
        "reason": "it and a accused each other 2 times",
    }
    kept_out = Event(kind="member_quarantined", generation=1, member_id="b", attributes=attributes)
    formed = Event(kind="generation_formed", generation=2, attributes={"world_size": "1"})
    (line,) = run.account.explain([FORMED, kept_out, formed], {}, run.clock.ns)
    assert line.startswith(
        "rank 1 (pid 7 on vm) was not admitted: it and a accused each other 2 times: training "
        "paused for 30."
    )
    assert run.account.figures.faults == 1


def test_steps_of_seconds_are_not_pauses_and_give_the_remaining_time(run: Run) -> None:
    run.join("a")
    for step in range(1, 31):
        run.clock.ns += 2_000 * MS
        run.steps(step, step, "a", generation=1)
        run.look()
    run.look(settle=True)
    assert run.account.course.standstills == []
    run.account.explain([FORMED], {}, run.clock.ns)
    run.clock.ns += 2_000 * MS
    assert not run.account.wants_events(run.clock.ns), "events are not requested in each step"
    status = run.account.status
    assert status is not None
    assert status.left is not None
    assert status.left.total_seconds() == pytest.approx(70 * 2.01)


def test_worker_that_leaves_a_continuing_run_has_left_but_not_if_all_leave_together(
    run: Run,
) -> None:
    run.join("a")
    run.steps(1, 20, "a", generation=1)
    run.steps(21, 30, "a", generation=2)
    run.look(settle=True)
    left = Event(
        kind="member_left",
        attributes={"rank": "1", "who": "rank 1 (pid 7 on vm)", "ending": "drained"},
    )
    formed = Event(kind="generation_formed", generation=2, attributes={"world_size": "1"})
    (line,) = run.account.explain([FORMED, left, formed, left], {}, run.clock.ns)
    assert (
        line == "rank 1 (pid 7 on vm) left: training paused for 0.010 s and continued from step 20 "
        "with 1 rank"
    )
    assert run.account.figures.leaves == 1


def test_batch_on_the_servers_counts_even_if_its_worker_died_before_counting_it(
    tmp_path,
) -> None:
    account, clock = RunAccount(), Clock()
    writers = {name: TallyWriter(tmp_path / name, clock_ns=clock) for name in "ab"}

    def push(name: str, commits: int, batch: int) -> None:
        writers[name].pushing(batch)
        counts = Counts(commits=commits, samples=4 * commits, asynchronous=True, batch=batch)
        writers[name].committed(counts, generation=1, steps=commits)

    first, second, third, fourth = 2**64 - 1, 2**63, 7, 8  # keys have 64 bits
    push("a", 1, first)
    push("a", 2, second)
    writers["a"].pushing(third)  # killed: the servers may have the batch
    push("b", 1, fourth)

    def tallies() -> dict[str, Tally]:
        return {
            name: tally for name in writers if (tally := read_tally(tmp_path / name)) is not None
        }

    account.take(tallies(), clock.ns)
    assert (account.figures.steps, account.figures.samples) == (3, 12)
    for batch in (second, third):  # both batches are dealt to b, whose servers know them already
        writers["b"].pushing(batch)
        writers["b"].known(batch, 1, 4)
    account.take(tallies(), clock.ns, settle=True)
    assert (account.figures.steps, account.figures.samples) == (4, 16)


def test_inner_steps_count_once_their_round_is_on_the_servers(tmp_path) -> None:
    """Steps count once the push of their round is acknowledged. Each round has three steps with
    four samples each."""
    account, clock = RunAccount(), Clock()
    meters: dict[str, ProgressMeter] = {}
    steps = dict.fromkeys("ab", 0)
    for name in "ab":
        meters[name] = ProgressMeter(WorkerMetrics())
        meters[name].tally_writer = TallyWriter(tmp_path / name, clock_ns=clock)

    def step(name: str, *, pushes: int = 0, known: bool = False) -> None:
        if pushes:
            meters[name].pushing(pushes)
        steps[name] += 1
        counts = {"generation": 1, "asynchronous": True, "known": known, "pushed": pushes > 0}
        meters[name].tally(steps[name], 4 * steps[name], 4, **counts)

    def figures() -> tuple[int, int]:
        tallies = {
            name: tally for name in steps if (tally := read_tally(tmp_path / name)) is not None
        }
        account.take(tallies, clock.ns, settle=True)
        return account.figures.steps, account.figures.samples

    def take_round(name: str, key: int, *, known: bool = False) -> None:
        step(name)
        step(name)
        step(name, pushes=key, known=known)

    take_round("a", 1)
    step("a")
    assert figures() == (3, 12)
    step("a")
    step("a", pushes=2)
    assert figures() == (6, 24)
    step("a")
    step("a")
    meters["a"].pushing(3)  # killed: the servers may have the round
    assert figures() == (6, 24)
    take_round("b", 3, known=True)
    assert figures() == (9, 36)
    step("b")
    meters["b"].round_undone()  # its loop was left
    assert figures() == (9, 36)
    take_round("b", 4)
    assert figures() == (12, 48)
    step("b")
    step("b")
    meters["b"].round_pushed()  # after optimizer.synchronize_parameters()
    assert figures() == (14, 56)
    step("b")
    assert figures() == (14, 56)


def test_torn_tally_is_read_as_of_the_previous_commit(tmp_path) -> None:
    path = tmp_path / "tally"
    writer = TallyWriter(path)
    for step in (1, 2, 3):
        writer.committed(Counts(commits=step, samples=step), generation=1, steps=step)
    content = bytearray(path.read_bytes())
    for at in (64, 64 + 192):
        torn = bytearray(content)
        torn[at + 20] ^= 0xFF
        path.write_bytes(torn)
        tally = read_tally(path)
        assert isinstance(tally, Tally)
        assert tally.counts.samples == tally.steps
        assert tally.steps == (3 if at == 64 else 2)
    assert read_tally(tmp_path / "none") is None


def test_a_line_that_ends_with_a_carriage_return_is_shown_above_the_table(
    monkeypatch, capsys
) -> None:
    view = LiveView("127.0.0.1:1", "job", fallback=lambda stream, data: None, progress=True)
    monkeypatch.setattr(Stream, "is_terminal", property(lambda stream: True))
    view.write(Stream.OUT, b"[0]: first\r\n[0]: second\n[0]: third\r\n")
    assert capsys.readouterr().out.splitlines() == ["[0]: first", "[0]: second", "[0]: third"]
