"""`shoal run` of workers that join their job: deaths, replacements, drains. The workers have no torch; all else is the real thing."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

Shell = Any  # of tests/integration/conftest.py
Command = Any


def start(shell: Shell, worker: Path, *flags: str, workers: int = 3) -> Command:
    """Starts a run, and waits until all have ranks in one generation."""
    command = shell.start("run", "--standalone", "--nproc-per-node", str(workers), *flags, worker, shell.directory / "finish")
    command.wait_for_output(*(f"[{rank}]: generation 1 rank {rank} of {workers}" for rank in range(workers)))
    return command


def finish(shell: Shell, command: Command) -> int:
    (shell.directory / "finish").touch()
    return int(command.wait())


def pid_of(shell: Shell, rank: int) -> int:
    status, out, err = shell.run("status", "--json")
    assert status == 0, err
    return next(int(member["pid"]) for member in json.loads(out)["members"] if member["rank"] == rank)


def test_all_workers_are_waited_for_at_the_start_and_the_end_is_a_success(shell: Shell, elastic_worker: Path) -> None:
    command = start(shell, elastic_worker)
    assert finish(shell, command) == 0, command.stderr
    assert command.family() == []


def test_a_killed_worker_is_replaced_while_the_others_go_on(shell: Shell, elastic_worker: Path) -> None:
    command = start(shell, elastic_worker)
    survivors = [pid_of(shell, rank) for rank in (0, 2)]
    status, out, err = shell.run("kill", "1")
    assert (status, err) == (0, "")
    pid = int(re.search(r"SIGKILL to pid (\d+)", out)[1])  # type: ignore[index]
    command.wait_for_output("of 2\n", "[1]: generation 3 rank")
    assert f"rank 1 (pid {pid}) ended with SIGKILL; the others go on, pid" in command.stderr
    assert survivors == [pid_of(shell, rank) for rank in (0, 1)]
    assert finish(shell, command) == 0
    assert f"although 1 of its workers failed on the way: rank 1 (pid {pid}, SIGKILL)" in command.stderr


def test_without_restarts_the_others_go_on_alone_down_to_one(shell: Shell, elastic_worker: Path) -> None:
    command = start(shell, elastic_worker, "--max-restarts", "0", workers=2)
    assert shell.run("kill", "0")[0] == 0
    command.wait_for_output("[1]: generation 2 rank 0 of 1")
    assert "the others go on without it" in command.stderr
    assert finish(shell, command) == 0


def test_when_all_have_failed_the_run_has(shell: Shell, elastic_worker: Path) -> None:
    command = start(shell, elastic_worker, "--max-restarts", "0", workers=2)
    assert shell.run("kill", "1")[0] == 0
    command.wait_for_output("[0]: generation 2 rank 0 of 1")
    assert shell.run("kill", "0")[0] == 0
    assert command.wait() == 128 + signal.SIGKILL
    assert "FAILED" in command.stderr


def test_a_drained_worker_leaves_and_is_not_replaced(shell: Shell, elastic_worker: Path) -> None:
    command = start(shell, elastic_worker)
    status, out, err = shell.run("drain", "2")
    assert (status, err) == (0, "")
    assert "leaves at its next step border" in out
    command.wait_for_output("[2]: left", "[0]: generation 2 rank 0 of 2")
    assert finish(shell, command) == 0
    assert "ended with" not in command.stderr


def test_a_signal_to_the_launcher_lets_the_workers_take_their_leave(shell: Shell, elastic_worker: Path) -> None:
    command = start(shell, elastic_worker, workers=2)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM
    assert {"[0]: left", "[1]: left"} <= set(command.stdout.splitlines())
    assert "FAILED" not in command.stderr


def test_the_launchers_word_of_a_death_comes_with_its_cause(shell: Shell, elastic_worker: Path) -> None:
    from shoal.launcher.registry import newest_cluster
    from shoal_common.clients.coordinator import CoordinatorClient
    from shoal_common.rpc.channel import ChannelSettings

    command = start(shell, elastic_worker, "--max-restarts", "0")
    record = newest_cluster(shell.directory / "runtime" / "shoal")
    assert shell.run("kill", "1")[0] == 0
    command.wait_for_output("[0]: generation 2 rank 0 of 2")
    with CoordinatorClient(ChannelSettings(address=record.coordinator)) as client:
        lost = [event for event in client.watch_events(record.job_id) if event.kind == "member_lost"]
    assert len(lost) == 1
    assert finish(shell, command) == 0


def test_the_coordinator_comes_back_and_the_job_goes_on(shell: Shell, elastic_worker: Path) -> None:
    command = start(shell, elastic_worker, workers=2)
    coordinator = next(process for process in command.family() if "shoal_coordinator" in process.cmdline())
    coordinator.kill()
    command.wait_for(lambda: "started again as pid" in command.stderr, "the coordinator's second start")
    command.wait_for(lambda: shell.run("kill", "1")[0] == 0, "the members' return")
    command.wait_for_output("[1]: generation 3 rank")
    assert finish(shell, command) == 0
