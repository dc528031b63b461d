"""Past runs on disk: retention, unreadable records, and the comparison of two runs."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console
from shoal.cli.terminal.past import run_view, runs_view
from shoal.launcher.processes.process import ExitStatus, start_ticks
from shoal.launcher.report.account import Pause, RunFigures
from shoal.launcher.report.changes import Change
from shoal.launcher.report.comparison import compare
from shoal.launcher.report.course import Course, Point, Standstill
from shoal.launcher.report.history import (
    History,
    Limits,
    Outcome,
    RecordedRun,
    RunEnd,
    Stored,
    Unreadable,
    WorkerEnd,
    course_of,
    history_directory,
    to_remove,
    write_run,
)
from shoal.launcher.run import recorder
from shoal.launcher.run.recorder import RunRecorder
from shoal.launcher.run.submissions import write_record
from shoal.launcher.workers.output import Stream
from shoal.launcher.workers.policy import WorkerExit
from shoal.launcher.workers.settings import RunSettings
from shoal_common.errors import ConfigurationError, UnknownResourceError

_GONE = 2**22 + 1
"""Process id that no process has, because it is too large."""
END = RunEnd(
    ended_unix_s=1090.0,
    exit_status=0,
    outcome=Outcome.COMPLETED,
    reason="",
    run=1,
    strategy="ddp",
    ranks=2,
    steps=300,
    last_step=300,
    steps_in_all=300,
    samples=3000,
    seconds=60.0,
    samples_per_s=50.0,
    faults=0,
    joins=0,
    leaves=0,
    pauses=0,
    paused_s=0.0,
    lost_s=0.0,
    loss=0.5,
    metrics={"accuracy": 0.75},
    workers=(WorkerEnd(rank=0, host="h", pid=7, ended="exit code 0", steps=300, loss=0.5),),
)
SETTINGS = RunSettings(
    command=("python", "-u", "train.py", "--lr", "0.1"),
    program="train.py",
    job_id="train",
    workers=2,
)


def kept(
    directory: Path, job_id: str, number: int, *, end: RunEnd | None = END, lives: bool = False
) -> RecordedRun:
    """Writes a run to disk and returns it. `lives`: True if the run's process is this one."""
    own = directory / job_id / str(number)
    own.mkdir(parents=True)
    pid = os.getpid() if lives else _GONE
    run = RecordedRun(
        job_id=job_id,
        number=number,
        program="train.py",
        arguments=("--lr", "0.1"),
        settings={"workers": "2"},
        host=os.uname().nodename,
        pid=pid,
        pid_start_ticks=start_ticks(pid) or 1,
        started_unix_s=1000.0 + number,
        end=end,
        directory=own,
    )
    write_run(run)
    return run


def stored(name: str, unix_s: float, nbytes: int = 10, *, ended: bool = True) -> Stored:
    return Stored(directory=Path(name), unix_s=unix_s, nbytes=nbytes, ended=ended)


def test_oldest_runs_beyond_the_number_or_size_are_removed_unless_running() -> None:
    runs = [stored(str(age), -age) for age in range(5)]
    limits = Limits(runs=3, nbytes=1000)
    assert [str(each.directory) for each in to_remove(runs, limits)] == ["3", "4"]
    assert [str(each.directory) for each in to_remove(runs, replace(limits, nbytes=25))] == [
        "2",
        "3",
        "4",
    ]
    assert to_remove([stored("large", 0, 5000)], limits) == [], "the newest run is always kept"
    running = [stored("old", -99, 5000, ended=False), *runs[:3]]
    assert to_remove(running, limits) == []


def test_pruning_removes_runs_of_all_kinds_and_empty_jobs(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        kept(tmp_path, "a", number)
    kept(tmp_path, "old", 0)
    (tmp_path / "old" / ".lock").touch()
    kept(tmp_path, "runs", 0, end=None, lives=True)
    (tmp_path / "begins" / "1").mkdir(parents=True)
    submitted = tmp_path / "submitted" / "1"
    submitted.mkdir(parents=True)
    known = {"job_id": "submitted", "run": 1, "coordinator": None, "arguments": []}
    write_record(submitted, pid=_GONE, started_unix_s=999.0, **known)
    History(tmp_path).prune(Limits(runs=2))
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*"))
    assert left == ["a/2", "a/3", "begins/1", "runs/0"]
    assert not (tmp_path / "old").exists()


def test_run_is_read_back_as_written(tmp_path: Path) -> None:
    run = kept(tmp_path, "a", 1)
    assert History(tmp_path).all() == [run]
    assert (run.outcome, run.took_s, run.name) == (Outcome.COMPLETED, 89.0, "a/1")


def test_run_without_an_end_is_running_or_was_killed(tmp_path: Path) -> None:
    assert kept(tmp_path, "a", 1, end=None, lives=True).outcome is Outcome.RUNNING
    assert kept(tmp_path, "a", 2, end=None).outcome is Outcome.KILLED


def test_runs_are_named_by_job_and_number(tmp_path: Path) -> None:
    history = History(tmp_path)
    for number in (9, 10):
        kept(tmp_path, "a", number)
    kept(tmp_path, "b", 1)
    assert history.find("a").number == 10
    assert history.find("a/9").number == 9
    assert [each.name for each in history.all("a") if isinstance(each, RecordedRun)] == [
        "a/10",
        "a/9",
    ]
    with pytest.raises(UnknownResourceError, match="no run 'a/3': this job has a/10, a/9"):
        history.find("a/3")
    with pytest.raises(UnknownResourceError, match="`shoal history` lists the recorded runs"):
        history.find("never")


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 99}', '{"format": 1, "end": {}}', ""])
def test_an_unreadable_record_is_named_and_harms_no_other(tmp_path: Path, text: str) -> None:
    good = kept(tmp_path, "a", 1)
    bad = tmp_path / "a" / "2"
    bad.mkdir()
    (bad / "run.json").write_text(text)
    run, unreadable = History(tmp_path).all()
    assert run == good
    assert isinstance(unreadable, Unreadable)
    assert unreadable.directory == bad
    assert unreadable.why
    assert "\n" not in unreadable.why


def test_launchers_that_start_simultaneously_get_a_directory_each_and_keep_it(
    tmp_path: Path,
) -> None:
    def begin(_: int) -> Path:
        history = History(tmp_path / "state")
        own = history.make_directory("a")
        history.prune(Limits(runs=1))
        return own

    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(begin, range(40)))
    assert sorted(int(path.name) for path in made) == list(range(1, 41))
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in (*made, made[0].parent))


def test_limits_come_from_environment_variables() -> None:
    assert Limits.load({}) == Limits(runs=100, nbytes=1 << 30)
    values = {"SHOAL_HISTORY_RUNS": "7", "SHOAL_HISTORY_MIB": "2"}
    assert Limits.load(values) == Limits(runs=7, nbytes=2 << 20)
    for text in ("-1", "many", "1.5"):
        with pytest.raises(ConfigurationError, match=f"SHOAL_HISTORY_RUNS='{text}': expected"):
            Limits.load({"SHOAL_HISTORY_RUNS": text})


def test_runs_are_kept_where_they_outlive_the_session() -> None:
    assert history_directory({"XDG_STATE_HOME": "/s"}) == Path("/s/shoal/jobs")
    assert history_directory({}) == Path.home() / ".local" / "state" / "shoal" / "jobs"


def figures() -> RunFigures:
    still = Standstill(began_ns=5, ended_ns=9, before=1, generation=2, steps=3)
    change = Change(generation=2, world_size=1, faults=("rank 1 ended with SIGKILL",))
    return RunFigures(
        steps=4,
        last_step=4,
        steps_in_all=0,
        samples=8,
        seconds=2.0,
        faults=1,
        joins=0,
        leaves=0,
        pauses=(Pause(standstill=still, changes=(change,)),),
        lost_s=0.5,
        loss=1.5,
        began_ns=1,
        points=(
            Point(at_ns=3, steps=2, samples=4, samples_per_s=4.0, loss=2.0, metrics={"lr": 0.1}),
        ),
        asynchronous=False,
    )


def test_figures_are_restored_with_their_pauses_and_points() -> None:
    assert course_of(json.loads(json.dumps(asdict(figures())))) == figures()


def test_a_comparison_has_both_results_and_only_the_settings_that_differ(tmp_path: Path) -> None:
    one = kept(tmp_path, "a", 1)
    worse = replace(END, outcome=Outcome.FAILED, steps=150, ranks=1, loss=None, strategy="zero1")
    other = replace(one, number=2, arguments=("--lr", "0.2"), end=worse)
    results, settings = compare(one, other)
    values = {row.name: (*row.values, row.change) for row in results}
    assert values["outcome"] == ("completed", "failed", "")
    assert values["steps"] == ("300", "150", "-50.0%")
    assert values["steps/s"] == ("5", "2.5", "-50.0%")
    assert values["loss"] == ("0.5", "-", "")
    assert values["accuracy"] == ("0.75", "0.75", "")
    assert {row.name: row.values for row in settings} == {
        "arguments": ("--lr 0.1", "--lr 0.2"),
        "strategy": ("ddp", "zero1"),
        "ranks": ("2", "1"),
    }
    assert compare(one, one)[1] == []


def test_a_killed_run_can_be_compared(tmp_path: Path) -> None:
    one = kept(tmp_path, "a", 1, end=None)
    results, _ = compare(one, kept(tmp_path, "a", 2))
    assert {row.name: row.values for row in results}["steps"] == ("-", "300")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "shoal" / "jobs"


def test_the_output_of_a_run_is_kept_in_two_files_of_bounded_size(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "LOG_BYTES", 40)
    shown: list[bytes] = []
    recording = RunRecorder.begin(SETTINGS)
    assert recording is not None
    write = recording.writer(lambda _, data: shown.append(data))
    for number in range(20):
        write(Stream.OUT, b"\x1b[36m[0]:\x1b[0m line %d\n" % number)
    write(Stream.OUT, b"half a bar\r")
    recording.close()
    run = History().find("train")
    assert list(run.log_lines())[-3:] == ["[0]: line 17", "[0]: line 18", "[0]: line 19"]
    assert 2 <= len(list(run.log_lines())) <= 6
    assert len(shown) == 21, "the terminal gets all lines unchanged"


def test_a_record_has_the_script_and_its_arguments_and_no_environment(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2")
    recording = RunRecorder.begin(SETTINGS)
    assert recording is not None
    assert History().find("train").outcome is Outcome.RUNNING
    recording.end(Outcome.STOPPED, "enough", exit_status=0, figures=figures(), course=Course())
    run = History().find("train/1")
    assert (run.program, run.arguments) == ("train.py", ("--lr", "0.1"))
    assert run.end is not None
    assert (run.outcome, run.end.reason, run.end.faults) == (Outcome.STOPPED, "enough", 1)
    assert run.figures() == figures()
    assert all("hunter2" not in path.read_text() for path in state.glob("*/*/*"))


def test_replaced_worker_is_listed_last_and_named_as_replaced(state: Path) -> None:
    recording = RunRecorder.begin(SETTINGS)
    assert recording is not None
    killed, done = ExitStatus.from_returncode(-signal.SIGKILL), ExitStatus(0)
    # rank 2 of the run became rank 1 after the death of rank 1
    for index, rank, pid, status in (
        (0, 0, 10, killed),
        (1, 1, 11, killed),
        (0, 0, 12, done),
        (2, 1, 13, done),
    ):
        ended = WorkerExit(
            index=index,
            rank=rank,
            started_as=index,
            pid=pid,
            status=status,
            host="h",
            unix_s=0.0,
        )
        recording.worker_ended(ended, member_id=str(pid))
    recording.end(Outcome.COMPLETED, "", exit_status=0, figures=figures(), course=Course())
    shown = Console(width=100, file=io.StringIO())
    shown.print(run_view(History().find("train/1"), datetime.now(UTC), []))
    rows = re.findall(
        r"^ +(\d) .* (\d+) .* (exit .*?|SIG.*?) *$", shown.file.getvalue(), re.MULTILINE
    )
    assert rows == [
        ("0", "12", "exit code 0"),
        ("1", "11", "SIGKILL"),
        ("1", "13", "exit code 0"),
        ("0", "10", "SIGKILL, replaced"),
    ]


@pytest.mark.parametrize(
    ("end", "step"),
    [
        (END, "300"),
        (replace(END, outcome=Outcome.INTERRUPTED, last_step=120), "120 of 300"),
        (replace(END, outcome=Outcome.INTERRUPTED, last_step=120, steps_in_all=0), "120"),
        # interrupted after a resume, before its first step
        (replace(END, outcome=Outcome.INTERRUPTED, last_step=0, steps_in_all=0, steps=0), "-"),
    ],
)
def test_list_of_runs_shows_the_progress_of_each(tmp_path: Path, end: RunEnd, step: str) -> None:
    shown = Console(width=100, file=io.StringIO())
    shown.print(runs_view([kept(tmp_path, "a", 1, end=end)]))
    header, row = shown.file.getvalue().splitlines()
    at = header.index(" step ") + len(" step")
    assert row[:at].split("  ")[-1].strip() == step


def test_narrow_list_of_runs_omits_columns_instead_of_truncating_them(tmp_path: Path) -> None:
    lists = {}
    run = kept(tmp_path, "a-long-name-of-a-script", 1, end=replace(END, last_step=1_234_567))
    for width in (60, 120):
        shown = Console(width=width, file=io.StringIO())
        shown.print(runs_view([run]))
        lists[width] = shown.file.getvalue()
    assert lists[60].split()[:3] == ["run", "began", "outcome"]
    assert lists[120].splitlines()[0].split()[-2:] == ["outcome", "arguments"]
    assert lists[120].rstrip().endswith("--lr 0.1")
    assert "…" not in lists[60] + lists[120]


def test_nothing_is_recorded_if_the_limit_is_zero(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HISTORY_RUNS", "0")
    assert RunRecorder.begin(SETTINGS) is None
    assert not state.exists()


def test_invalid_job_id_creates_no_directory(state: Path) -> None:
    assert RunRecorder.begin(replace(SETTINGS, job_id="../../away")) is None
    assert not state.parent.exists()


def test_directory_that_cannot_be_created_is_reported_in_one_line_and_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    recording = RunRecorder.begin(SETTINGS)
    assert recording is not None
    recording.keep(events=(), page="page", run=1, ranks=2)
    recording.end(Outcome.COMPLETED, "", exit_status=0, figures=figures(), course=Course())
    (problem,) = recording.problems
    assert problem.startswith("this run is not recorded for `shoal history`: ")
    assert "set XDG_STATE_HOME" in problem
