"""Machines that are taken away, fail a health check, or have workers that die repeatedly.

Launchers share a coordinator; SHOAL_HOST makes each of them a separate machine. The workers do not
use torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shoal.cli.terminal.view import job_json
from shoal.client.messages import job_of
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import UnknownResourceError
from shoal_common.exit_status import EVICTED, PREEMPTED
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2 as pb

from tests import metadata
from tests.metadata import metadata_service

Shell = Any  # of tests/integration/conftest.py
Command = Any

DEADLINE_S = 200.0
POLL_S = 0.05


@pytest.fixture
def client(endpoint: str) -> Iterator[CoordinatorClient]:
    with CoordinatorClient(ChannelSettings(address=endpoint)) as client:
        yield client


def start(
    shell: Shell, endpoint: str, worker: Path, *flags: str, host: str, **variables: str
) -> Command:
    return shell.start(
        "run",
        "--nnodes",
        "1:2",
        "--rdzv-endpoint",
        endpoint,
        *flags,
        worker,
        shell.directory / "finish",
        SHOAL_HOST=host,
        **variables,
    )


def pids(client: CoordinatorClient, host: str) -> list[int]:
    """Returns the process ids of the ranked members on a host."""
    try:
        members = client.get_job("default").members
    except UnknownResourceError:  # no launcher has created the job yet
        return []
    return [each.pid for each in members if each.host == host and each.rank >= 0]


def kinds(client: CoordinatorClient) -> list[tuple[str, str]]:
    events = client.watch_events("default")
    return [(event.kind, event.attributes.get("host", "")) for event in events]


def test_preemption_notice_makes_the_workers_leave_while_the_others_continue(
    shell: Shell, endpoint: str, client: CoordinatorClient, elastic_worker: Path
) -> None:
    with metadata_service("aws") as service:
        stays = start(shell, endpoint, elastic_worker, host="stays")
        goes = start(
            shell,
            endpoint,
            elastic_worker,
            host="goes",
            SHOAL_PREEMPTION_NOTICE="auto",
            SHOAL_METADATA_URL=service.url,
            http_proxy="http://127.0.0.1:9",
        )
        goes.wait_for(lambda: pids(client, "goes") and pids(client, "stays"), "two ranks")
        goes.wait_for(
            lambda: f"watching for preemption notices of AWS ({service.url})" in goes.stderr,
            "the watch",
        )
        service.pages[metadata.AWS_ACTION] = json.dumps(
            {"action": "terminate", "time": "2026-11-29T15:00:00Z"}
        )
        assert goes.wait() == PREEMPTED, goes.stderr
    assert (
        "AWS will terminate this machine at 2026-11-29T15:00:00Z; the workers on this machine "
        "leave at their next step boundary"
    ) in goes.stderr
    assert ("machine_leaving", "goes") in kinds(client)
    assert ("member_lost", "") not in kinds(client), "the worker left, and did not die"
    assert not client.get_job("default").machines, "the machine is gone"
    assert pids(client, "stays")
    (shell.directory / "finish").touch()
    assert stays.wait() == 0, stays.stderr


def test_a_preemption_notice_ends_the_run_of_shoal_up(shell: Shell, elastic_worker: Path) -> None:
    with metadata_service("gcp") as service:
        command = shell.start(
            *("up", "--workers", "2", "--preemption-notice", "gcp"),
            *(elastic_worker, shell.directory / "finish"),
            SHOAL_METADATA_URL=service.url,
        )
        command.wait_for(lambda: "generation 1 rank 1 of 2" in command.stdout, "two ranks")
        service.pages[metadata.GCP_PREEMPTED] = "TRUE"
        assert command.wait() == PREEMPTED, command.stderr
    assert "GCP will stop this machine within 30 s (preempted); the workers on" in command.stderr


def test_machine_where_workers_keep_dying_is_excluded_with_the_reason(
    shell: Shell, endpoint: str, client: CoordinatorClient, elastic_worker: Path
) -> None:
    good = start(shell, endpoint, elastic_worker, host="good")
    bad = start(shell, endpoint, elastic_worker, "--max-restarts", "100", host="bad")
    killed: set[int] = set()
    started_at = time.monotonic()
    while bad.process.poll() is None and time.monotonic() < started_at + DEADLINE_S:
        for pid in set(pids(client, "bad")) - killed if pids(client, "good") else ():
            killed.add(pid)
            with contextlib.suppress(ProcessLookupError):  # it may just have left
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    assert bad.wait() == EVICTED, bad.stderr
    assert "job default refuses this machine: its workers died 4 times within" in bad.stderr
    status = job_json(job_of(client.get_job("default")))
    (machine,) = status["machines"]
    assert (machine["host"], machine["condition"]) == ("bad", "excluded")
    assert machine["reason"].startswith("its workers died 4 times within")
    code, shown, _ = shell.run("status", "--coordinator", endpoint, "--job", "default")
    assert code == 0
    assert "machine bad is excluded since" in " ".join(shown.split())

    again = start(shell, endpoint, elastic_worker, host="bad")
    assert again.wait() == EVICTED, again.stderr
    assert "job default refuses this machine: its workers died 4 times" in again.stderr
    assert pids(client, "good")

    code, shown, error = shell.run("readmit", "bad", "--coordinator", endpoint, "--job", "default")
    assert code == 0, error
    repaired = start(shell, endpoint, elastic_worker, host="bad")
    repaired.wait_for(lambda: pids(client, "bad"), "a rank on the readmitted machine")
    assert client.get_job("default").phase == pb.JOB_PHASE_RUNNING
    (shell.directory / "finish").touch()
    assert [good.wait(), repaired.wait()] == [0, 0], repaired.stderr


@pytest.mark.slow
def test_a_machine_that_fails_its_health_checks_is_refused_until_it_passes_them(
    shell: Shell, endpoint: str, client: CoordinatorClient, elastic_worker: Path
) -> None:
    good = start(shell, endpoint, elastic_worker, host="good")
    good.wait_for(lambda: pids(client, "good"), "a rank")
    finish = shell.directory / "finish"
    flags = ("--nnodes", "1:2", "--rdzv-endpoint", endpoint)
    sick = shell.start_program(
        *("sh", "-c", 'ulimit -f 2048; exec "$@"', "sh", sys.executable, "-m", "shoal", "run"),
        *(*flags, "--health-checks", elastic_worker, finish),
        SHOAL_HOST="sick",
    )
    assert sick.wait() == EVICTED, sick.stderr
    failed = "disk: [Errno 27] File too large"
    assert f"this machine failed its health checks: {failed}" in sick.stderr
    assert sick.stdout == "", "no worker was started"
    (machine,) = client.get_job("default").machines
    assert machine.host == "sick"
    assert machine.condition == pb.MACHINE_CONDITION_UNHEALTHY
    assert machine.reason == failed

    unchecked = start(shell, endpoint, elastic_worker, host="sick")
    assert unchecked.wait() == EVICTED, unchecked.stderr
    assert f"job default refuses this machine: {failed}" in unchecked.stderr

    repaired = start(shell, endpoint, elastic_worker, "--health-checks", host="sick")
    repaired.wait_for(lambda: pids(client, "sick"), "a rank on the repaired machine")
    assert "health checks of this machine passed" in repaired.stderr
    assert not client.get_job("default").machines
    finish.touch()
    assert [good.wait(), repaired.wait()] == [0, 0], repaired.stderr


@pytest.mark.slow
def test_worker_is_not_replaced_on_a_machine_that_has_become_unhealthy(
    shell: Shell, endpoint: str, client: CoordinatorClient, elastic_worker: Path
) -> None:
    good = start(shell, endpoint, elastic_worker, host="good")
    good.wait_for(lambda: pids(client, "good"), "a rank")
    finish, temporary = shell.directory / "finish", shell.directory / "temporary"
    temporary.mkdir()
    sick = shell.start_program(
        *(sys.executable, "-m", "shoal", "run", "--nnodes", "1:2", "--rdzv-endpoint", endpoint),
        *("--health-checks", elastic_worker, finish),
        SHOAL_HOST="sick",
        TMPDIR=str(temporary),
    )
    sick.wait_for(lambda: pids(client, "sick"), "a rank on the healthy machine")
    shutil.rmtree(temporary)  # the disk fails
    os.kill(pids(client, "sick")[0], signal.SIGKILL)
    assert sick.wait() == EVICTED, sick.stderr
    assert "ended with SIGKILL; not replaced" in sick.stderr
    assert "this machine failed its health checks: disk: [Errno 2] No such file" in sick.stderr
    (machine,) = client.get_job("default").machines
    assert (machine.host, machine.condition) == ("sick", pb.MACHINE_CONDITION_UNHEALTHY)
    finish.touch()
    assert good.wait() == 0, good.stderr


@pytest.mark.slow
def test_plain_script_is_not_restarted_on_a_machine_that_has_become_unhealthy(shell: Shell) -> None:
    temporary = shell.directory / "temporary"
    temporary.mkdir()
    script = shell.script(
        "import os, shutil, sys\nshutil.rmtree(os.environ['TMPDIR'])\nsys.exit(3)\n"
    )
    status, _, error = shell.run(
        *("run", "--standalone", "--health-checks", "--max-restarts", "1", script),
        TMPDIR=str(temporary),
    )
    assert status == EVICTED, error
    assert "restart 1 of 1" in error
    assert "this machine failed its health checks: disk: [Errno 2] No such file" in error
