"""Running clusters are found without an address."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shoal.launcher.clusters.registry import (
    Registration,
    newest_cluster,
    registry_directory,
    running_clusters,
)
from shoal.launcher.processes.process import start_ticks
from shoal_common.errors import UnknownResourceError


def register(directory: Path, port: int) -> Registration:
    return Registration(
        job_id=f"job-{port}",
        coordinator=f"127.0.0.1:{port}",
        http="127.0.0.1:2",
        redis="redis://127.0.0.1:3",
        command="x",
        directory=directory,
    )


def test_newest_running_cluster_is_found(tmp_path: Path) -> None:
    first, second = register(tmp_path, 1), register(tmp_path, 2)
    assert [record.job_id for record in running_clusters(tmp_path)] == ["job-2", "job-1"]
    assert newest_cluster(tmp_path).coordinator == "127.0.0.1:2"
    second.close()
    assert newest_cluster(tmp_path).job_id == "job-1"
    first.close()
    assert list(tmp_path.iterdir()) == []


def test_cluster_that_runs_the_job_is_found_among_several(tmp_path: Path) -> None:
    first, second = register(tmp_path, 1), register(tmp_path, 2)
    assert newest_cluster(tmp_path, job="job-1").coordinator == "127.0.0.1:1"
    with pytest.raises(
        UnknownResourceError,
        match=r"job 'other' \(running jobs: job-2, job-1\).*--coordinator HOST:PORT",
    ):
        newest_cluster(tmp_path, job="other")
    first.close()
    second.close()


def test_missing_cluster_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        UnknownResourceError, match=r"shoal run --standalone.*--coordinator HOST:PORT"
    ):
        newest_cluster(tmp_path / "missing")


def test_records_of_dead_processes_are_removed(tmp_path: Path) -> None:
    path = register(tmp_path, 1).path
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    rewrite(path, pid=dead.pid)
    assert running_clusters(tmp_path) == []
    assert not path.exists()


def test_process_with_a_reused_pid_does_not_count(tmp_path: Path) -> None:
    path = register(tmp_path, 1).path
    rewrite(path, pid_start_ticks=(start_ticks(os.getpid()) or 0) - 1)
    assert running_clusters(tmp_path) == []


def test_clusters_of_other_hosts_in_a_shared_home_are_left_alone(tmp_path: Path) -> None:
    path = register(tmp_path, 1).path
    rewrite(path, host="elsewhere")
    assert running_clusters(tmp_path) == []
    assert path.exists()


def test_files_of_other_releases_and_damaged_ones_are_skipped(tmp_path: Path) -> None:
    rewrite(register(tmp_path, 1).path, format=99)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    good = register(tmp_path, 2)
    assert [record.job_id for record in running_clusters(tmp_path)] == ["job-2"]
    good.close()


def test_directory_belongs_to_the_user() -> None:
    assert registry_directory({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/shoal")
    assert registry_directory({"XDG_CACHE_HOME": "/c"}) == Path("/c/shoal/run")
    assert registry_directory({}) == Path.home() / ".cache" / "shoal" / "run"


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
