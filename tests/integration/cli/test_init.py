"""Scripts written by `shoal init` run with the command that it prints."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

Shell = Any  # of tests/integration/conftest.py

_PLAIN = Path(__file__).parents[3] / "examples" / "train_plain.py"


@pytest.mark.slow
def test_the_starter_survives_a_kill_keeps_the_best_checkpoint_and_resumes(shell: Shell) -> None:
    assert shell.run("init")[0] == 0
    run = ("run", "--standalone", "--nproc-per-node", "2")
    command = shell.start(*run, "train.py", "--epochs", "30")
    command.wait_for_output("epoch 1: accuracy")
    victim = shell.pids()[1]
    os.kill(victim, signal.SIGKILL)
    assert command.wait() == 0, command.stderr
    assert f"recovered from 1 worker failure: rank 1 (pid {victim}, SIGKILL)" in command.stderr
    epochs = re.findall(r"epoch (\d+): accuracy (\S+), best (\S+)", command.stdout)
    assert [int(epoch) for epoch, _, _ in epochs] == list(range(30))
    best = max(float(accuracy) for _, accuracy, _ in epochs)
    assert best > 0.9
    assert float(epochs[-1][2]) == best
    assert (shell.directory / "model.pt").stat().st_size > 0

    status, out, err = shell.run(*run, "train.py", "--epochs", "31")
    assert status == 0, err
    assert "shoal: resumed from checkpoints/step-960\n" in err
    (again,) = re.findall(r"epoch (\d+): accuracy \S+, best (\S+)", out)
    assert again[0] == "30"
    assert float(again[1]) >= best


def test_a_converted_script_trains_on_two_workers(shell: Shell) -> None:
    import torch

    source = _PLAIN.read_text()
    for old, new in (
        ("import torch\n", "import torch\nfrom tqdm import tqdm\n"),
        ("range(300)", "range(1, 5)"),
        ("in loader:", "in tqdm(loader, desc=str(epoch)):"),
        (
            "optimizer = torch",
            "average = torch.optim.swa_utils.AveragedModel(model)\noptimizer = torch",
        ),
        (
            "        optimizer.zero_grad()\n",
            "        optimizer.zero_grad()\n        average.update_parameters(model)\n",
        ),
    ):
        assert source.count(old) == 1
        source = source.replace(old, new)
    source += "print('averaged:', int(average.n_averaged))\n"
    shell.script(f"{source}torch.save(model.state_dict(), 'model.pt')\n", "plain.py")
    status, out, _ = shell.run("init", "--from", "plain.py")
    assert (status, "not converted" in out) == (0, False)
    status, out, err = shell.run("run", "--standalone", "--nproc-per-node", "2", "plain_elastic.py")
    assert status == 0, err
    losses = [float(loss) for loss in re.findall(r"epoch [1-4]: loss (\S+)", out)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert "76 steps" in err
    assert out.count("averaged: 76\n") == 1
    saved = torch.load(shell.directory / "model.pt")
    assert [*saved] == ["1.weight", "1.bias", "3.weight", "3.bias"]  # of the plain model
