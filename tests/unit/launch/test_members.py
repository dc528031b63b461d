"""A worker or a parameter server is killed only if it belongs to the right cluster and job."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from shoal.launcher.processes.members import kill_member, kill_server
from shoal_common.errors import ShoalError, UnknownResourceError

WAITS = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
JOB = "a-job-of-test-members"
SERVER = f"shoal_ps_server --job {JOB} --server-id=server-0 --coordinator 127.0.0.1:7001"


@contextlib.contextmanager
def started(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a process that ends when its standard input is closed. For a moment after `exec`,
    the kernel shows neither command line nor environment, so waits for the first output."""
    with subprocess.Popen(
        [*WAITS, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """A process with the command line of a parameter server."""
    with started(*SERVER.split()) as process:
        yield process


@pytest.mark.parametrize(
    ("job", "server_id", "coordinator"),
    [
        (JOB, "server-0", "127.0.0.1:7002"),
        (JOB, "server-0", "127.0.0.2:7001"),
        (JOB, "server-0", "no-such-host.invalid:7001"),
        (JOB, "server-1", "127.0.0.1:7001"),
        ("another", "server-0", "127.0.0.1:7001"),
    ],
)
def test_a_server_of_another_cluster_or_job_is_left_alone(
    server: subprocess.Popen[bytes], job: str, server_id: str, coordinator: str
) -> None:
    with pytest.raises(UnknownResourceError, match="runs on this machine") as raised:
        kill_server(job_id=job, server_id=server_id, coordinator=coordinator)
    assert raised.value.reason == "PROCESS_UNKNOWN"
    assert server.poll() is None


@pytest.mark.parametrize("coordinator", ["127.0.0.1:7001", "localhost:7001"])
def test_the_server_is_killed_by_any_name_of_its_coordinator(
    server: subprocess.Popen[bytes], coordinator: str
) -> None:
    killed = kill_server(job_id=JOB, server_id="server-0", coordinator=coordinator)
    assert killed == server.pid
    assert server.wait(60) == -9


@pytest.mark.parametrize(
    ("host", "reason"),
    [("a-name-of-shoal-host", "MEMBER_ELSEWHERE"), (socket.gethostname(), "PROCESS_UNKNOWN")],
)
def test_a_worker_is_identified_by_its_member_id_under_any_host_name(
    host: str, reason: str
) -> None:
    with started(SHOAL_MEMBER_ID="m1") as worker:
        with pytest.raises(ShoalError, match="rank 0") as raised:
            kill_member(rank=0, host=host, pid=worker.pid, member_id="m2")
        assert raised.value.reason == reason
        assert worker.poll() is None
        kill_member(rank=0, host=host, pid=worker.pid, member_id="m1")
        assert worker.wait(60) == -9
