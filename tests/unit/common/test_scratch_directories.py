"""What is removed for the dead, and what is not."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from shoal_common.scratch import ScratchDirectory, remove_orphans


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def owner(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another process with a directory."""
    script = "from shoal_common.scratch import ScratchDirectory; own = ScratchDirectory('test'); print(own.path, flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", script], env={"TMPDIR": str(temporary)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    (path / "below").mkdir()
    (path / "below" / "file").touch()
    return process, path


def test_it_is_gone_with_what_it_holds_when_it_is_closed(temporary: Path) -> None:
    scratch = ScratchDirectory("test")
    (scratch.path / "file").touch()
    scratch.close()
    scratch.close()
    assert list(temporary.iterdir()) == []


def test_the_next_owner_removes_what_a_killed_one_left_and_nothing_of_the_living(temporary: Path) -> None:
    (dead, left), (living, kept) = owner(temporary), owner(temporary)
    with dead, living:
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
    assert list(temporary.iterdir()) == []


def test_a_forked_child_that_ends_takes_nothing_away(temporary: Path) -> None:
    script = (
        "import os, sys; from shoal_common.scratch import ScratchDirectory; own = ScratchDirectory('test'); child = os.fork()\n"
        "if not child: sys.exit(0)\n"
        "os.waitpid(child, 0); print(own.path.exists())"
    )
    answer = subprocess.check_output([sys.executable, "-c", script], env={"TMPDIR": str(temporary)}, text=True, timeout=60)
    assert answer == "True\n"
    assert list(temporary.iterdir()) == []


def test_whatever_has_no_owners_lock_is_left_alone(temporary: Path) -> None:
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
