"""The exit status and messages of `shoal run` when workers raise, are evicted, or are asked to
leave. The table is in docs/exit-status.md."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.exit_status import EVICTED, PREEMPTED
from shoal_common.rpc.channel import ChannelSettings

Shell = Any  # of tests/integration/conftest.py
Command = Any

TRAINING = """
    import os, signal, time, torch, shoal
    shoal.init()
    model = torch.nn.Linear(4, 1)
    model, optimizer = shoal.as_distributed(model, torch.optim.SGD(model.parameters(), 0.1))
    dataset = torch.utils.data.TensorDataset(torch.zeros(64, 4))
    loader = shoal.ElasticDataLoader(dataset, global_batch_size=4)
    for epoch in loader.epochs(10_000):
        for (rows,) in loader:
            optimizer.zero_grad()
            model(rows).sum().backward()
            optimizer.step()
            time.sleep(0.01)  # else the ranks that go on would take the processors from joiners
            if loader.global_step == 5:
"""


def start(shell: Shell, worker: Path, *flags: str, workers: int = 2) -> Command:
    """Starts a run and waits until all workers have ranks in one generation."""
    command = shell.start(
        "run",
        "--standalone",
        "--nproc-per-node",
        str(workers),
        *flags,
        worker,
        shell.directory / "finish",
    )
    command.wait_for_output(
        *(f"[{rank}]: generation 1 rank {rank} of {workers}" for rank in range(workers))
    )
    return command


BUG = "if shoal.rank() == 1: raise ValueError('a bug on one rank')"
DEATH = "os.kill(os.getpid(), signal.SIGKILL)"


def training(shell: Shell, at_step_5: str) -> Path:
    """Returns a script that trains for a long time and runs `at_step_5` in its fifth step."""
    script: Path = shell.script(textwrap.dedent(TRAINING) + " " * 16 + at_step_5)
    return script


def test_a_bug_on_one_rank_ends_the_job_with_its_traceback_first_and_its_status(
    shell: Shell,
) -> None:
    command = shell.start("run", "--standalone", "--nproc-per-node", "2", training(shell, BUG))
    assert command.wait() == 1, command.stderr
    assert (
        "it raised an exception, which a restarted worker would probably raise too, so the job ends"
        in command.stderr
    )
    received = command.stderr.partition("First failure")[2]
    assert re.search(r"rank +: 1 (.*\n)+.*ValueError: a bug on one rank", received), command.stderr
    assert "Later failures" not in received


def test_worker_that_raises_is_replaced_up_to_max_restarts_times(
    shell: Shell, elastic_worker: Path
) -> None:
    command = start(shell, elastic_worker, "--max-restarts", "1")
    (shell.directory / "raise-1").touch()
    command.wait_for(
        lambda: "ended with exit code 1; continuing, replaced by pid" in command.stderr,
        "the replacement",
    )
    assert command.wait() == 1
    assert (
        "it raised an exception, which a restarted worker would probably raise too, so the job ends"
        in command.stderr
    )
    assert "[0]: left" in command.stdout


def test_fail_fast_overrides_an_earlier_no_fail_fast(shell: Shell, elastic_worker: Path) -> None:
    """The last of --fail-fast and --no-fail-fast on the command line applies, for example if a
    wrapper passes one and its caller the other."""
    command = start(shell, elastic_worker, "--no-fail-fast", "--fail-fast")
    (shell.directory / "raise-1").touch()
    assert command.wait() == 1
    assert (
        "it raised an exception, which a restarted worker would probably raise too, so the job ends"
        in command.stderr
    )
    assert "[0]: left" in command.stdout


def test_without_fail_fast_the_others_finish_and_the_status_shows_the_failure(
    shell: Shell, elastic_worker: Path
) -> None:
    command = start(shell, elastic_worker, "--no-fail-fast")
    (shell.directory / "raise-1").touch()
    command.wait_for_output("[0]: generation 2 rank 0 of 1")
    command.wait_for(
        lambda: "exit code 1; continuing without it" in command.stderr, "the launcher's word"
    )
    (shell.directory / "finish").touch()
    assert command.wait() == 1
    assert "FAILED" in command.stderr


def test_evicted_worker_is_replaced(shell: Shell, elastic_worker: Path) -> None:
    command = start(shell, elastic_worker)
    record = shell.cluster()
    with CoordinatorClient(ChannelSettings(address=record.coordinator)) as client:
        victim = client.get_job(record.job_id).members[1]
        # as for a lost host, but the worker is alive
        client.report_exit(record.job_id, victim.member_id, exit_code=1)
    command.wait_for_output("[0]: generation 2 rank 0 of 1", "[1]: generation 3 rank 1 of 2")
    assert (
        f"rank 1 (pid {victim.pid}) ended with exit code {EVICTED}; continuing, replaced by pid"
        in command.stderr
    )
    (shell.directory / "finish").touch()
    assert command.wait() == 0


def test_a_run_whose_workers_were_all_drained_is_not_a_success(
    shell: Shell, elastic_worker: Path
) -> None:
    command = start(shell, elastic_worker)
    record = shell.cluster()
    with CoordinatorClient(ChannelSettings(address=record.coordinator)) as client:
        for member in client.get_job(record.job_id).members:
            client.drain_member(record.job_id, member_id=member.member_id)
    assert command.wait() == EVICTED
    assert (
        "is not finished: the last workers on this machine left because they were asked to"
        in command.stderr
    )


def test_death_of_all_holders_of_the_state_is_reported_prominently(
    shell: Shell, elastic_worker: Path
) -> None:
    command = start(shell, elastic_worker, "--allow-restart-from-scratch", workers=1)
    for process in command.family():
        if process.pid in shell.pids():
            process.kill()
    command.wait_for(
        lambda: "NO WORKER THAT HOLDS THE TRAINING STATE IS LEFT" in command.stderr,
        "the launcher's word",
    )
    command.wait_for_output("[0]: generation 2 rank 0 of 1", "SHOAL_ALLOW_RESTART_FROM_SCRATCH=1")
    (shell.directory / "finish").touch()
    assert command.wait() == 0


@pytest.mark.slow
@pytest.mark.fresh
def test_training_that_would_restart_at_step_0_fails_the_run(shell: Shell) -> None:
    command = shell.start("run", "--standalone", training(shell, DEATH))
    assert command.wait() == 1, command.stderr
    assert re.search(
        r"First failure(.*\n)+.*no worker with the run's state is left(.*\n)+.*SIGKILL",
        command.stderr,
    )


def test_preempted_run_reports_it_and_names_workers_that_did_not_leave_in_time(
    shell: Shell,
) -> None:
    deaf = shell.script(
        "import os, pathlib, signal, sys\n"
        "pathlib.Path(os.environ['SHOAL_MEMBER_FILE']).write_text('joined')\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('heard', flush=True))\n"
        "print('started', flush=True)\n"
        "while True: signal.pause()\n"
    )
    command = shell.start("run", "--standalone", "--shutdown-timeout", "1", deaf)
    command.wait_for_output("[0]: started")
    command.wait_for(shell.cluster, "the cluster")
    for _ in range(2):  # as when both a batch system and a supervisor pass it on
        command.process.send_signal(signal.SIGTERM)
    assert command.wait() == PREEMPTED
    assert command.stdout.count("heard") == 1
    assert "again" not in command.stderr
    assert re.search(
        r"killing rank 0 \(pid \d+\) after 1 s \(--shutdown-timeout\); a checkpoint that is still",
        command.stderr,
    )


@pytest.mark.parametrize(
    ("strategy", "leave"),
    [
        pytest.param("ddp", "break", marks=[pytest.mark.slow, pytest.mark.fresh]),
        pytest.param("zero1", "raise SystemExit(0)", marks=[pytest.mark.slow, pytest.mark.fresh]),
        pytest.param("ddp", "raise SystemExit(0)", marks=pytest.mark.matrix),
        pytest.param("zero1", "break", marks=pytest.mark.matrix),
    ],
)
def test_a_rank_that_ends_before_the_others_fails_the_run(
    shell: Shell, strategy: str, leave: str
) -> None:
    at_step_5 = f"if shoal.rank() == 1: {leave}"
    script = training(shell, at_step_5)
    text = script.read_text().replace(
        "torch.optim.SGD(model.parameters(), 0.1)",
        f"torch.optim.SGD(model.parameters(), 0.1), strategy='{strategy}'",
    )
    script.write_text(
        text.replace("range(10_000)", "range(1)").replace("epochs(10_000)", "epochs(1)")
    )
    command = shell.start("run", "--standalone", "--nproc-per-node", "2", script)
    assert command.wait() == 1, command.stderr
    assert "ranks diverged" in command.stderr


def saving_to_a_full_disk(shell: Shell) -> Path:
    return shell.script(
        textwrap.dedent(TRAINING).replace("10_000", "1").partition("        if")[0]
        + "import resource\n"
        + "resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))  # as of a full disk\n"
        + "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        + "shoal.save_checkpoint('checkpoints')\n"
    )


@pytest.mark.slow
@pytest.mark.fresh
def test_a_last_checkpoint_that_was_not_written_fails_the_run(shell: Shell) -> None:
    command = shell.start(
        "run", "--standalone", "--nproc-per-node", "2", saving_to_a_full_disk(shell)
    )
    assert command.wait() == 1, command.stderr
    assert (
        "this worker failed: the last checkpoint was not saved" in command.stderr + command.stdout
    )


@pytest.mark.slow
def test_last_checkpoint_that_was_not_written_fails_a_single_process(
    shell: Shell,
) -> None:
    script = saving_to_a_full_disk(shell)
    alone = subprocess.run(
        [sys.executable, script],
        check=False,
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert alone.returncode == 1, alone.stderr
    assert "this process failed: the last checkpoint was not saved" in alone.stderr


@pytest.mark.slow
@pytest.mark.fresh
def test_a_script_that_ends_by_system_exit_has_finished(shell: Shell) -> None:
    body = textwrap.indent(
        textwrap.dedent(TRAINING).replace("10_000", "1").partition("        if")[0], "    "
    )
    script = shell.script(
        f"import shoal\ndef main():\n{body}\n    return 0\nraise SystemExit(main())\n"
    )
    command = shell.start("run", "--standalone", "--nproc-per-node", "2", script)
    assert command.wait() == 0, command.stderr


def test_ranks_with_shards_confirm_the_end_in_their_last_group(shell: Shell) -> None:
    """A script without shoal.shutdown() leaves its job while the interpreter exits."""
    body = textwrap.dedent(TRAINING).replace("10_000", "1").partition("        if")[0]
    script = shell.script(body.replace("0.1))", "0.1), strategy='zero2')"))
    status, _, errors = shell.run("run", "--standalone", "--nproc-per-node", "2", script)
    assert status == 0, errors
    (events,) = shell.directory.glob("state/shoal/jobs/*/1/events.jsonl")
    kinds = [json.loads(line)["kind"] for line in events.read_text().splitlines()]
    assert kinds.count("generation_formed") == 1, kinds
    assert "collective_failed" not in kinds
