"""Scratch directories of dead processes are removed, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from shoal_common.system.scratch import ScratchDirectory, remove_orphans


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def cleanup_processes(process: int) -> list[psutil.Process]:
    return psutil.Process(process).children()


def wait_empty(directory: Path) -> None:
    give_up_at = time.monotonic() + 10
    while left := list(directory.iterdir()):
        assert time.monotonic() < give_up_at, left
        time.sleep(0.01)


def owner(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    """Starts another process with a scratch directory. Returns the process and the path."""
    script = (
        "from shoal_common.system.scratch import ScratchDirectory; own = ScratchDirectory('test'); "
        "print(own.path, flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    (path / "below").mkdir()
    (path / "below" / "file").touch()
    return process, path


def test_closed_directory_is_removed_with_its_contents(temporary: Path) -> None:
    scratch = ScratchDirectory("test")
    (scratch.path / "file").touch()
    scratch.close()
    scratch.close()
    assert list(temporary.iterdir()) == []


def test_cleanup_process_ends_with_the_directory() -> None:
    others = cleanup_processes(os.getpid())
    scratch = ScratchDirectory("test")
    (keeper,) = [one for one in cleanup_processes(os.getpid()) if one not in others]
    scratch.close()
    assert not keeper.is_running()


def test_directory_of_a_killed_owner_is_removed_without_another_owner(temporary: Path) -> None:
    process, path = owner(temporary)
    assert path.parent == temporary
    with process:
        process.send_signal(signal.SIGKILL)
    wait_empty(temporary)


def test_signals_to_the_owners_group_do_not_reach_the_cleanup_process(temporary: Path) -> None:
    process, _ = owner(temporary)
    with process:
        (keeper,) = cleanup_processes(process.pid)
        assert os.getsid(keeper.pid) == keeper.pid
        process.kill()
    wait_empty(temporary)


@pytest.mark.parametrize("moment", ["tempfile.mkstemp", "fcntl.flock", "pathlib.Path.rename"])
def test_owner_killed_before_its_directory_is_locked_leaves_none(
    temporary: Path, moment: str
) -> None:
    module = moment.split(".", 1)[0]
    script = (
        f"import os, signal, {module}; from shoal_common.system.scratch import ScratchDirectory\n"
        f"{moment} = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        "ScratchDirectory('test')"
    )
    died = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TMPDIR": str(temporary)},
        timeout=60,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL
    wait_empty(temporary)


def test_files_written_after_the_owners_death_are_removed_too(temporary: Path) -> None:
    process, path = owner(temporary)
    with process:
        process.kill()
    give_up_at = time.monotonic() + 10
    while path.exists() and time.monotonic() < give_up_at:
        pass
    path.mkdir()  # as a server may, which creates its directory again while the kernel ends it
    (path / "file").touch()
    wait_empty(temporary)


def test_next_owner_removes_leftovers_if_the_cleanup_process_died_too(
    temporary: Path,
) -> None:
    (dead, left), (living, kept) = owner(temporary), owner(temporary)
    with dead, living:
        for keeper in cleanup_processes(dead.pid):
            keeper.kill()
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert left.exists()
        own = ScratchDirectory("test")
        assert not left.exists()
        assert (kept / "below" / "file").exists()
        assert own.path.exists()
        living.kill()
    own.close()
    remove_orphans()
    wait_empty(temporary)


def test_directory_without_a_lock_is_removed_after_a_minute_and_not_before(
    temporary: Path,
) -> None:
    old, young, other = (
        temporary / name
        for name in ("shoal-scratch-test-1", "shoal-scratch-test-2", "shoal-logs-1")
    )
    for path in (old, young, other):
        path.mkdir()
    an_hour_ago = time.time() - 3600
    for path in (old, other):
        os.utime(path, (an_hour_ago, an_hour_ago))
    remove_orphans()
    assert sorted(temporary.iterdir()) == [other, young]


def test_exiting_forked_child_removes_nothing(temporary: Path) -> None:
    script = (
        "import os, sys; from shoal_common.system.scratch import ScratchDirectory; own = "
        "ScratchDirectory('test'); child = os.fork()\n"
        "if not child: sys.exit(0)\n"
        "os.waitpid(child, 0); print(own.path.exists())"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert list(temporary.iterdir()) == []


def test_directories_without_an_owners_lock_file_are_left_alone(temporary: Path) -> None:
    (temporary / "shoal-logs-1").mkdir()
    (temporary / "shoal-file").touch()
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".shoal-owner").touch()
    (temporary / "shoal-link").symlink_to(elsewhere)
    (temporary / "shoal-linked-lock").mkdir()
    (temporary / "shoal-linked-lock" / ".shoal-owner").symlink_to(elsewhere / ".shoal-owner")
    before = sorted(temporary.rglob("*"))
    remove_orphans()
    assert sorted(temporary.rglob("*")) == before


def test_a_living_owner_keeps_its_directory_when_a_cleaner_has_taken_the_lock_file() -> None:
    owner = ScratchDirectory("living")
    (owner.path / ".shoal-owner").unlink()
    long_ago = time.time() - 86400
    os.utime(owner.path, (long_ago, long_ago))
    ScratchDirectory("other").close()
    assert owner.path.is_dir()
    owner.close()
    assert not owner.path.exists()
