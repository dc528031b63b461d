"""`shoal coordinate`: runs a command with a coordinator beside it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.exit_status import PREEMPTED
from shoal_common.rpc.channel import ChannelSettings

Shell = Any  # of tests/integration/conftest.py
Command = Any

HERE = ("coordinate", "--host", "127.0.0.1", "--")
RUN = (sys.executable, "-m", "shoal", "run", "--nnodes", "1:2")


def coordinator(command: Command) -> psutil.Process:
    (found,) = (
        process
        for process in command.family()
        if "shoal_coordinator" in process.cmdline() and process.ppid() == command.process.pid
    )
    return found


def test_launchers_find_the_coordinator_and_return_the_commands_exit_status(shell: Shell) -> None:
    script = shell.script("import os\nprint(os.environ['WORLD_SIZE'], flush=True)\n")
    both = shell.script(
        '"$@" & first=$!\n"$@" & second=$!\nwait $first && wait $second && exit 7\n', "both.sh"
    )
    status, out, err = shell.run(*HERE, "sh", both, *RUN, "--nnodes", "2", script)
    assert status == 7, err
    assert sorted(out.splitlines()) == ["[0]: 2", "[1]: 2"]


@pytest.mark.slow
@pytest.mark.fresh
def test_signal_to_every_process_spares_the_coordinator_until_the_command_has_ended(
    shell: Shell, elastic_worker: Path
) -> None:
    """Batch systems signal every process of a job at once."""
    command = shell.start(*HERE, *RUN, elastic_worker, "never")
    command.wait_for_output("rank 0 of 1")
    its_coordinator = coordinator(command)
    its_redis = its_coordinator.children()
    assert its_redis
    for process in (its_coordinator, *its_redis):
        process.send_signal(signal.SIGTERM)
    with CoordinatorClient(ChannelSettings(address=address(its_coordinator))) as client:
        assert len(client.list_jobs().jobs) == 2, "the job and its launchers'"
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == PREEMPTED, command.stderr
    assert "left" in command.stdout
    assert "ended" not in command.stderr.partition("SIGTERM")[0]
    command.wait_until_gone()


def address(process: psutil.Process) -> str:
    arguments = process.cmdline()
    return arguments[arguments.index("--listen") + 1]


def test_dead_coordinator_restarts_with_its_state(shell: Shell, elastic_worker: Path) -> None:
    finish = shell.directory / "finish"
    command = shell.start(*HERE, *RUN, elastic_worker, finish)
    command.wait_for_output("rank 0 of 1")
    its_coordinator = coordinator(command)
    command.wait_for(
        lambda: time.time() - its_coordinator.create_time() > 8,
        "a coordinator that has served for a while",
    )
    os.kill(its_coordinator.pid, signal.SIGKILL)
    command.wait_for(lambda: "and was restarted as pid" in command.stderr, "the next coordinator")
    finish.touch()
    assert command.wait() == 0, command.stderr
    command.wait_until_gone()


def test_invalid_command_lines_are_refused_before_anything_starts(shell: Shell) -> None:
    for flags, said in (
        (("coordinate", "--", "no-such-program"), "'no-such-program' was not found on PATH"),
        (
            ("coordinate", "--host", "192.0.2.77", "--", "true"),
            "--host '192.0.2.77' is not an address of this machine",
        ),
    ):
        status, _, err = shell.run(*flags)
        assert (status, said in err) == (2, True), err


def test_redis_reachable_from_other_machines_without_tls_must_be_allowed_explicitly(
    shell: Shell,
) -> None:
    command = shell.start_program(
        sys.executable, "-m", "shoal_coordinator", "--redis", "embedded://192.0.2.77"
    )
    assert command.wait() == 1
    assert (
        "--redis embedded://192.0.2.77 can be reached from other machines without TLS; pass "
        "--insecure" in command.stderr
    )
