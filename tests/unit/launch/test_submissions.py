"""Records of background runs: which are kept, which count as ended, and which are ignored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from shoal.launcher.run.submissions import (
    Outcome,
    Submissions,
    write_outcome,
    write_record,
)
from shoal_common.errors import ConfigurationError, UnknownResourceError

_GONE = 2**22 + 1
"""Process id that no process has, because it is too large."""


def record(directory: Path, job_id: str, run: int, *, pid: int = _GONE) -> Path:
    own = directory / job_id / str(run)
    own.mkdir(parents=True)
    write_record(
        own,
        pid=pid,
        started_unix_s=1000.0 + run,
        job_id=job_id,
        run=run,
        coordinator=None,
        arguments=["train.py"],
    )
    return own


def test_the_newest_run_of_a_job_counts(tmp_path: Path) -> None:
    found = Submissions(tmp_path)
    for run in (9, 10, 2):
        record(tmp_path, "a", run)
    record(tmp_path, "b", 1, pid=os.getpid())
    assert found.newest("a").run == 10
    assert [(each.job_id, each.run) for each in found.all()] == [("a", 10), ("b", 1)]


def test_run_has_ended_if_recorded_or_if_its_process_is_gone(tmp_path: Path) -> None:
    own = record(tmp_path, "a", 1, pid=os.getpid())
    running = Submissions(tmp_path).newest("a")
    assert (running.is_running, running.outcome(), running.has_ended) == (True, None, False)
    write_outcome(own, Outcome(exit_status=3, summary="why", ended_unix_s=5.0))
    assert running.outcome() == Outcome(exit_status=3, summary="why", ended_unix_s=5.0)
    record(tmp_path, "b", 1)
    outcome = Submissions(tmp_path).newest("b").outcome()
    assert outcome is not None
    assert outcome.exit_status is None
    assert "is gone and left no result" in outcome.summary


@pytest.mark.parametrize("job_id", ["", "../a", "a/b", "never"])
def test_job_that_was_not_submitted_is_unknown(tmp_path: Path, job_id: str) -> None:
    with pytest.raises(UnknownResourceError, match="you have not submitted job"):
        Submissions(tmp_path).newest(job_id)


def test_invalid_job_ids_are_refused_before_anything_is_created(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"job id '\.\./a': expected 1 to 64 characters"):
        Submissions(tmp_path / "jobs").submit("../a", [], coordinator=None, environment={})
    assert list(tmp_path.iterdir()) == []


def test_records_of_other_releases_and_incomplete_ones_are_skipped(tmp_path: Path) -> None:
    record(tmp_path, "a", 1)
    (tmp_path / "a" / "2").mkdir()
    (tmp_path / "a" / "3").mkdir()
    (tmp_path / "a" / "3" / "submission.json").write_text('{"format": 99}')
    assert Submissions(tmp_path).newest("a").run == 1
