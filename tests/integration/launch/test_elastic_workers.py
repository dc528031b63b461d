"""`shoal run` with workers that join their job: deaths, replacements, drains. The workers do not
use torch; all other parts are real."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.zygote.children import eventually

Shell = Any  # of tests/integration/conftest.py
Command = Any

LINGERS = """
import os, pathlib, runpy, sys, time

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
give_up_at = time.monotonic() + 300
while os.environ["LOCAL_RANK"] == "1" and not pathlib.Path("go").exists():
    if time.monotonic() > give_up_at: raise TimeoutError("the test did not write the file 'go'")
    time.sleep(0.02)
"""


def start(
    shell: Shell, worker: Path, *flags: str, workers: int = 3, script: Path | None = None
) -> Command:
    """Starts a run and waits until all workers have ranks in one generation. `script`: runs the
    worker; None: the worker is the script."""
    command = shell.start(
        "run",
        "--standalone",
        "--nproc-per-node",
        str(workers),
        *flags,
        *(() if script is None else (script,)),
        worker,
        shell.directory / "finish",
    )
    command.wait_for_output(
        *(f"[{rank}]: generation 1 rank {rank} of {workers}" for rank in range(workers))
    )
    return command


def finish(shell: Shell, command: Command) -> int:
    (shell.directory / "finish").touch()
    return int(command.wait())


def test_all_workers_are_waited_for_at_the_start_and_the_end_is_a_success(
    shell: Shell, elastic_worker: Path
) -> None:
    command = start(shell, elastic_worker)
    assert finish(shell, command) == 0, command.stderr
    assert "not finished" not in command.stderr
    assert command.family() == []


def test_killed_worker_is_replaced_while_the_others_continue(
    shell: Shell, elastic_worker: Path
) -> None:
    command = start(shell, elastic_worker)
    first, victim, third = shell.pids()
    os.kill(victim, signal.SIGKILL)
    command.wait_for_output("of 2\n", "[1]: generation 3 rank 2 of 3")
    assert (
        f"rank 1 (pid {victim}) ended with SIGKILL; continuing, replaced by pid" in command.stderr
    )
    assert shell.pids()[:2] == [first, third]
    assert finish(shell, command) == 0
    assert f"recovered from 1 worker failure: rank 1 (pid {victim}, SIGKILL)" in command.stderr


def test_events_name_the_signal_even_if_the_coordinator_notices_the_loss_before_the_launcher(
    shell: Shell, elastic_worker: Path
) -> None:
    command = start(shell, elastic_worker, workers=2)
    victim = shell.pids()[1]
    command.process.send_signal(signal.SIGSTOP)
    try:
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: len(shell.job().members) == 1, "the coordinator to notice the death")
    finally:
        command.process.send_signal(signal.SIGCONT)
    command.wait_for_output("[1]: generation 3 rank 1 of 2")
    assert finish(shell, command) == 0
    lines = shell.run("events")[1].splitlines()
    lost, exited = (
        next(line for line in lines if kind in line) for kind in ("member_lost", "member_exited")
    )
    assert "its session's stream broke" in lost
    assert 'detail="its process ended with SIGKILL" rank=1' in exited


@pytest.mark.slow  # the line follows after 10 s
def test_finished_run_names_the_worker_it_waits_for(shell: Shell, elastic_worker: Path) -> None:
    command = start(shell, elastic_worker, workers=2, script=shell.script(LINGERS))
    last = shell.pids()[1]
    (shell.directory / "finish").touch()
    said = f"waiting for rank 1 (pid {last}) to end, since the run is over\n"
    command.wait_for(lambda: said in command.stderr, "the line")
    (shell.directory / "go").touch()
    assert command.wait() == 0


def test_without_restarts_the_others_continue_until_the_last_one_dies_and_the_run_fails(
    shell: Shell, elastic_worker: Path
) -> None:
    command = start(shell, elastic_worker, "--max-restarts", "0", workers=2)
    first, second = shell.pids()
    os.kill(first, signal.SIGKILL)
    command.wait_for_output("[1]: generation 2 rank 0 of 1")
    command.wait_for(lambda: "continuing without it" in command.stderr, "the launcher's word")
    os.kill(second, signal.SIGKILL)
    assert command.wait() == 128 + signal.SIGKILL
    assert re.search(
        r"First failure(.*\n){3}  rank      : 0 (.*\n)+Later failures:\n.*rank 0 \(output \[1\]\) "
        r"on ",
        command.stderr,
    )


def test_failure_survived_by_the_others_is_reported_and_does_not_fail_the_run(
    shell: Shell, elastic_worker: Path
) -> None:
    command = start(shell, elastic_worker, "--max-restarts", "0", workers=2)
    os.kill(shell.pids()[0], signal.SIGKILL)
    command.wait_for_output("[1]: generation 2 rank 0 of 1")
    assert finish(shell, command) == 0
    assert "run completed; recovered from 1 worker failure" in command.stderr


def test_signal_to_the_launcher_lets_the_workers_leave(shell: Shell, elastic_worker: Path) -> None:
    command = start(shell, elastic_worker, workers=2)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM
    assert {"[0]: left", "[1]: left"} <= set(command.stdout.splitlines())
    assert "FAILED" not in command.stderr


def test_launcher_asked_to_end_just_after_a_death_leaves_no_replacement_behind(
    shell: Shell, elastic_worker: Path
) -> None:
    command = start(shell, elastic_worker, workers=2)
    os.kill(shell.pids()[1], signal.SIGKILL)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM
    command.wait_until_gone()  # a worker that was just forked dies shortly after the launcher


def test_coordinator_returns_and_the_job_continues(shell: Shell, elastic_worker: Path) -> None:
    command = start(shell, elastic_worker, workers=2)
    coordinator = next(
        process for process in command.family() if "shoal_coordinator" in process.cmdline()
    )
    coordinator.kill()
    command.wait_for(
        lambda: "was restarted as pid" in command.stderr, "the coordinator's second start"
    )
    os.kill(shell.pids()[1], signal.SIGKILL)
    command.wait_for_output("[1]: generation 3 rank 1 of 2")
    assert finish(shell, command) == 0
