"""`shoal jobs`, `events`, `stop`, `submit`, `logs` and `top` on running clusters whose workers do
not use torch."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shoal.launcher.run.submissions import Submissions
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.exit_status import EVICTED
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1.coordinator_pb2 import JobSpec

Shell = Any  # of tests/integration/conftest.py
Command = Any


@pytest.fixture(scope="module")
def cluster(shared_shell: Shell, elastic_worker: Path) -> Command:
    """Two workers with ranks, and a parameter server. Tests must not end them."""
    flags = ("--standalone", "--nproc-per-node", "2", "--servers", "1", "--rdzv-id", "digits")
    command = shared_shell.start("run", *flags, elastic_worker, shared_shell.directory / "finish")
    command.wait_for_output(*(f"[{rank}]: generation 1" for rank in range(2)))
    command.wait_for(
        lambda: (
            shared_shell.job().servers and all(m.progress.step for m in shared_shell.job().members)
        ),
        "a server, and steps",
    )
    return command


@pytest.fixture
def submitted(shell: Shell) -> Iterator[Submissions]:
    """Submits commands with `shell`; stops those that still run when the test ends."""
    found = Submissions(shell.directory / "state" / "shoal" / "jobs")
    yield found
    for submission in found.all():
        submission.kill()


def test_jobs_are_listed(shared_shell: Shell, cluster: Command) -> None:
    status, out, err = shared_shell.run("jobs")
    assert (status, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["job", "phase", "generation", "ranks", "ended"],
        ["digits", "running", "1", "2", "-"],
    ]
    status, out, _ = shared_shell.run(
        "jobs", "--json", "--coordinator", shared_shell.cluster().coordinator
    )
    assert json.loads(out) == [
        {"job_id": "digits", "phase": "running", "generation": 1, "world_size": 2, "result": None}
    ]


def test_jobs_command_without_jobs_names_the_remedy(shell: Shell) -> None:
    status, out, err = shell.run("jobs")
    assert (status, err) == (0, "")
    assert "start one with `shoal run` or `shoal submit`" in out
    status, out, err = shell.run("logs")
    assert (status, out) == (1, "")
    assert "start one with `shoal submit`" in err


def test_events_are_printed_one_per_line(shared_shell: Shell, cluster: Command) -> None:
    status, out, err = shared_shell.run("events", COLUMNS="80")
    assert (status, err) == (0, "")
    assert out.splitlines()[0].split()[1] == "job_created"
    assert any(
        re.search(r'generation_formed  generation 1  cause=start reason=".*" world_size=2$', line)
        for line in out.splitlines()
    )
    status, out, _ = shared_shell.run("events", "--json")
    assert [json.loads(line)["kind"] for line in out.splitlines()].count("member_joined") == 2


def test_top_frame_shows_ranks_servers_other_jobs_and_events(
    shared_shell: Shell, cluster: Command
) -> None:
    with CoordinatorClient(ChannelSettings(address=shared_shell.cluster().coordinator)) as client:
        client.create_job(JobSpec(job_id="another", min_workers=2, max_workers=2))
    for flags, columns in ((("--once",), "140"), ((), "80")):
        # without a terminal, too, it prints one frame
        status, out, err = shared_shell.run("top", *flags, COLUMNS=columns)
        assert (status, err) == (0, "")
        assert "job digits  running, generation 1, 2 of 2 workers have a rank" in out
        assert {
            "rank",
            "epoch",
            "step",
            "samples/s",
            "loss",
            "waiting",
            "server",
            "partitions",
            "values",
            "server-0",
        } <= set(out.split())
        assert columns == "80" or {"accuracy", "0.75"} <= set(out.split())
        assert ["another", "waiting", "-", "-", "-"] in [line.split() for line in out.splitlines()]
        assert "generation_formed" in out
        assert max(map(len, out.splitlines())) <= int(columns)
        assert "\x1b" not in out


def test_top_on_a_terminal_runs_until_q(shared_shell: Shell, cluster: Command) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", "top", "--interval", "0.1"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**shared_shell.environment, "TERM": "xterm-256color"},
    )
    try:
        seen, deadline = b"", time.monotonic() + 90
        while seen.count(b"q to quit") < 3 or b"generation_formed" not in seen:
            assert time.monotonic() < deadline, seen[-3000:].decode(errors="replace")
            seen += read_some(ours)
        os.write(ours, b"q")
        while process.poll() is None:
            assert time.monotonic() < deadline
            read_some(ours)  # the screen is restored
        assert process.returncode == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def read_some(terminal: int) -> bytes:
    """Returns the available output after a short wait; this process holds both ends of the
    terminal."""
    return os.read(terminal, 65536) if select.select([terminal], [], [], 0.1)[0] else b""


def test_stop_ends_a_job_at_a_step_boundary_and_ends_followed_events(
    shell: Shell, elastic_worker: Path
) -> None:
    run = shell.start(
        "run",
        "--standalone",
        "--fail-on-stop",
        "--nproc-per-node",
        "2",
        "--rdzv-id",
        "short",
        elastic_worker,
        shell.directory / "finish",
    )
    run.wait_for_output("generation 1 rank 0", "generation 1 rank 1")
    events = shell.start("events", "--follow")
    events.wait_for_output("generation_formed")
    status, out, err = shell.run("stop", "--reason", "seen enough")
    assert (status, out, err) == (0, "job short will stop after the current step\n", "")
    assert run.wait() == EVICTED
    assert re.search(r"^shoal: stopped at step \d+.*: seen enough$", run.stderr, re.MULTILINE)
    assert (events.wait(), events.stderr) == (0, "")
    assert "stop_requested" in events.stdout
    assert "seen enough" in events.stdout


def test_logs_follow_a_submitted_job_that_outlives_the_command(
    shell: Shell, submitted: Submissions, elastic_worker: Path
) -> None:
    status, out, err = shell.run(
        "submit",
        "--job",
        "background",
        "--nproc-per-node",
        "2",
        elastic_worker,
        shell.directory / "finish",
    )
    assert (status, err) == (0, "")
    assert (
        out == "submitted job background; `shoal logs --follow --job background` shows its output\n"
    )
    logs = shell.start("logs", "--follow")
    logs.wait_for_output("generation 1 rank 0", "generation 1 rank 1")
    status, _, err = shell.run("submit", "--job", "background", elastic_worker)
    assert (status, "is already running" in err) == (1, True)
    (shell.directory / "finish").touch()
    assert logs.wait() == 0
    assert "[1]: left" in logs.stdout
    status, out, _ = shell.run("jobs")
    assert ["background", "finished", "-", "-", "succeeded"] in [
        line.split() for line in out.splitlines()
    ]
    assert submitted.newest("background").outcome() is not None


@pytest.mark.parametrize("command", ["stop", "events", "top"])
def test_every_command_without_a_cluster_names_the_remedy(shell: Shell, command: str) -> None:
    status, out, err = shell.run(command)
    assert (status, out) == (1, "")
    assert (
        "no cluster of yours is running on this machine; start one (shoal run --standalone" in err
    )
