"""Commands on a machine whose file systems are full or read-only, as in a container with
`read_only: true`.

The test uses its own mount namespace, so nothing changes for other processes. That requires root.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

Shell = Any  # of tests/integration/conftest.py

# The directories given before -- stay writable. Separate file systems (/tmp, /dev/shm) are not
# affected.
_ENTER = """
set -e
mount --make-rprivate /
while [ "$1" != -- ]; do mount --bind "$1" "$1"; writable="$writable $1"; shift; done
shift
mount --bind / /
awk '$3 == "tmpfs" || $2 == "/" {print $2}' /proc/self/mounts | sort -u | while read -r mounted; do
    case " $writable " in *" $mounted "*) ;; *) mount -o remount,bind,ro "$mounted" ;; esac
done
cd /
exec "$@"
"""


@functools.cache
def why_not() -> str:
    """Returns why this machine cannot make read-only mounts; empty: it can."""
    probe = 'if touch "$0" 2>/dev/null; then exit 3; fi'
    try:
        done = subprocess.run(
            [
                "unshare",
                "--mount",
                "sh",
                "-c",
                _ENTER,
                "sh",
                "--",
                "sh",
                "-c",
                probe,
                f"/tmp/shoal-probe-{os.getpid()}",
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except OSError as error:
        return f"there is no unshare: {error}"
    return (
        ""
        if done.returncode == 0
        else f"a mount namespace needs root: {done.stderr.strip() or 'it is not read-only'}"
    )


_FILL = """
set -e
mount --make-rprivate /
mount -t tmpfs -o size=64k none "$1"
head -c 1M /dev/zero > "$1/fill" 2>/dev/null || true
exec "$2" -m shoal_coordinator --listen 127.0.0.1:0 --redis "embedded://$1/redis"
"""


def test_embedded_redis_on_a_full_disk_is_reported_as_out_of_space(
    shell: Shell, tmp_path: Path
) -> None:
    if why := why_not():
        pytest.skip(why)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", _FILL, "sh", tmp_path, sys.executable],
        env=shell.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert f"the disk of {tmp_path / 'redis'} is full; free some space" in line


def run(
    shell: Shell, *command: str | Path, writable: Path | None = None
) -> tuple[int, str, list[str]]:
    """Runs a module with all file systems read-only except `writable`, which becomes TMPDIR.
    Returns its status, its output and its error lines, without those about a slow start."""
    if why := why_not():
        pytest.skip(why)
    environment = {**shell.environment, "HOME": "/nonexistent/home"}
    environment.pop("TMPDIR", None)
    if writable is not None:
        environment["TMPDIR"] = str(writable)
    done = subprocess.run(
        [
            *(
                "unshare",
                "--mount",
                "sh",
                "-c",
                _ENTER,
                "sh",
                *([writable] if writable is not None else []),
                "--",
            ),
            *(sys.executable, "-m", *command),
        ],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if not line.endswith(" since the start")]
    return done.returncode, done.stdout, lines


TRAINING = """
import torch, shoal

model = torch.nn.Linear(4, 1)
model, optimizer = shoal.as_distributed(model, torch.optim.SGD(model.parameters(), 0.1))
loader = shoal.ElasticDataLoader(
    torch.utils.data.TensorDataset(torch.ones(16, 4)), global_batch_size=4
)
for (x,) in loader:
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", loader.global_step)
"""
NO_TEMPORARY = r"No usable temporary directory found in \[.*\]; set TMPDIR to a writable directory"


@pytest.mark.parametrize(
    "command",
    [
        ("shoal", "run", "--standalone", "none.py"),
        ("shoal", "coordinate", "--", "true"),
        ("shoal_coordinator", "--listen", "127.0.0.1:0"),
        ("shoal_ps_server", "--job", "j", "--coordinator", "127.0.0.1:1"),
    ],
    ids=lambda command: command[0] + "-" + command[1].strip("-"),
)
def test_missing_temporary_directory_is_reported_in_one_line(
    shell: Shell, command: tuple[str, ...]
) -> None:
    arguments = [shell.script("print('ran')") if each == "none.py" else each for each in command]
    status, out, lines = run(shell, *arguments)
    assert status != 0
    assert out == ""
    assert len(lines) == 1, lines
    assert re.fullmatch(rf"shoal[a-z-]*: {NO_TEMPORARY}", lines[0]), lines


@pytest.mark.parametrize(
    "command",
    [
        (
            "shoal_coordinator",
            "--listen",
            "127.0.0.1:0",
            "--redis",
            "embedded:///var/lib/shoal-none",
        ),
        (
            "shoal_ps_server",
            "--job",
            "j",
            "--coordinator",
            "127.0.0.1:1",
            "--data-dir",
            "/var/lib/shoal-none",
        ),
        ("shoal", "run", "--standalone", "--log-dir", "/var/lib/shoal-none", "none.py"),
        ("shoal", "run", "--standalone", "--record-dir", "/var/lib/shoal-none", "none.py"),
    ],
    ids=["coordinator", "server", "log-dir", "record-dir"],
)
def test_unwritable_data_directory_is_named_in_one_line(
    shell: Shell, tmp_path: Path, command: tuple[str, ...]
) -> None:
    arguments = [shell.script("print('ran')") if each == "none.py" else each for each in command]
    writable = tmp_path / "writable"
    writable.mkdir()
    status, out, lines = run(shell, *arguments, writable=writable)
    assert status != 0
    assert out == ""
    assert len(lines) == 1, lines
    assert "Read-only file system" in lines[0]
    assert "/var/lib/shoal-none" in lines[0]
    assert re.search(r"use (a writable|another) directory|to a writable directory", lines[0]), lines


@pytest.mark.slow
def test_training_needs_only_a_temporary_directory(shell: Shell, tmp_path: Path) -> None:
    writable = tmp_path / "writable"
    writable.mkdir()
    flags = ("run", "--standalone", "--nproc-per-node", "2", "--servers", "1")
    status, out, lines = run(shell, "shoal", *flags, shell.script(TRAINING), writable=writable)
    assert (status, out.count("trained 4")) == (0, 2), lines
    assert not any("Traceback" in line for line in lines), lines
    assert [line for line in lines if "pass --coordinator" in line], lines
