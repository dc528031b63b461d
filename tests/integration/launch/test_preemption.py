"""SIGTERM to `shoal run` of a training script: the state that it leaves, the launcher's messages,
and how the next run continues."""

from __future__ import annotations

import json
import re
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
from shoal_common.exit_status import PREEMPTED
from shoal_worker.checkpoint.files import latest, read_checkpoint
from shoal_worker.data.record import audit

Shell = Any  # of tests/integration/conftest.py
Command = Any

STEPS = 48
TRAINING = """
    import json, os, pathlib, shoal, time, torch
    from torch import nn

    shoal.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model, optimizer = shoal.as_distributed(
        net, torch.optim.AdamW(net.parameters(), 0.01), strategy="zero2"
    )
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    loader = shoal.ElasticDataLoader(torch.utils.data.TensorDataset(rows), global_batch_size=4)
    shoal.resume("checkpoints")
    began_at = None
    for epoch in loader.epochs(3):
        for (batch,) in loader:
            if began_at is None:
                began_at = loader.global_step
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            shoal.save_checkpoint(
                "checkpoints", every_steps=int(os.environ.get("SAVE_EVERY", "1000000"))
            )
            if loader.global_step == 3:
                pathlib.Path(f"trains-{shoal.rank()}").touch()
            if loader.global_step >= 3 and not pathlib.Path("go").exists():
                time.sleep(0.2)  # a slow step: the signal is to come while steps go on
    shoal.save_checkpoint("checkpoints")
    pathlib.Path(f"ended-{shoal.rank()}").write_text(json.dumps([began_at, loader.global_step]))
"""
FLAGS = ("run", "--standalone", "--nproc-per-node", "2")


def preempt(shell: Shell, *flags: str, **variables: str) -> tuple[Path, Command]:
    """Starts a run of two ranks and ends it by SIGTERM in the middle; returns the script and the
    command."""
    script = shell.script(textwrap.dedent(TRAINING))
    command = shell.start(*FLAGS, *flags, script, SHOAL_RECORD_DIR="records", **variables)
    command.wait_for(
        lambda: all((shell.directory / f"trains-{rank}").exists() for rank in range(2)), "training"
    )
    if variables:
        command.wait_for(
            lambda: latest(shell.directory / "checkpoints") is not None, "a checkpoint"
        )
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == PREEMPTED, command.stderr
    return script, command


def ended(shell: Shell) -> list[tuple[int, int]]:
    """Returns the first and last step of each rank's script, and deletes these records."""
    received = []
    for path in sorted(shell.directory.glob("ended-*")):
        received.append(tuple(json.loads(path.read_text())))
        path.unlink()
    return received


def finish(shell: Shell, script: Path, *, records: str) -> None:
    (shell.directory / "go").touch()
    command = shell.start(*FLAGS, script, SHOAL_RECORD_DIR=records)
    assert command.wait() == 0, command.stderr


def newest_step(shell: Shell) -> int:
    found = latest(shell.directory / "checkpoints")
    assert found is not None
    read_checkpoint(found)
    return int(found.name.removeprefix("step-"))


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(False, marks=pytest.mark.matrix),
        pytest.param(True, marks=[pytest.mark.slow, pytest.mark.fresh]),
    ],
)
def test_preempted_run_saves_at_one_step_boundary_and_its_resumption_takes_each_sample_once(
    shell: Shell, again: bool
) -> None:
    """SHOAL_DRAIN_GRACE_S keeps its default of 1 s, within which the launcher asks both workers to
    leave."""
    script, command = preempt(shell)
    received = ended(shell)
    assert len(received) == 2
    assert len(set(received)) == 1
    assert re.search(r"[1-9]\d* leaves?:", command.stderr) is None, command.stderr
    (stopped_at,) = {step for _, step in received}
    assert 3 <= stopped_at < STEPS
    assert newest_step(shell) == stopped_at
    assert audit(shell.directory / "records").once == stopped_at * 4
    if again:
        finish(shell, script, records="records")
        assert ended(shell) == [(stopped_at, STEPS)] * 2
        verdict = audit(shell.directory / "records")
        assert len(verdict.epochs) == 3
        assert verdict.exactly_once, verdict


@pytest.mark.slow
@pytest.mark.fresh
def test_grace_shorter_than_the_write_leaves_the_older_checkpoint_intact(
    shell: Shell,
) -> None:
    script, command = preempt(
        shell,
        "--shutdown-timeout",
        "3",
        SAVE_EVERY="2",
        SHOAL_FAILPOINTS="checkpoint.shard_written@2=hang",
    )
    assert (
        "after 3 s (--shutdown-timeout); a checkpoint that is still being written will be discarded"
        in command.stderr
    )
    assert newest_step(shell) == 2
    ended(shell)
    finish(shell, script, records="other")
    assert ended(shell) == [(2, STEPS)] * 2
