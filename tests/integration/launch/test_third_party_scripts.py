"""Scripts from the tests of other libraries, or typical of their users, end under `shoal run` as
they do under torchrun."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

Shell = Any  # of tests/integration/conftest.py

TRAINER = Path(__file__).parents[1] / "programs" / "trainer.py"
NANO_GPT = TRAINER.with_name("nano_gpt_training.py")
IN_TWO = ("--standalone", "--nproc-per-node", "2")
OFFLINE = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}


def of_accelerate(name: str) -> Path:
    """Returns the path of one of accelerate's own test scripts. Two are left out.
    test_distributed_data_loop hangs on CPUs under torchrun too. test_ops takes itself for a single
    process on CPUs, so it would test nothing."""
    found = find_spec("accelerate")
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "test_utils" / "scripts" / f"{name}.py"


def endings(output: str) -> list[str]:
    """Returns the last line of each rank of TRAINER, without the rank's prefix."""
    return sorted(line[line.index("ranks ") :] for line in output.splitlines() if "ranks " in line)


@pytest.mark.slow
@pytest.mark.fresh
@pytest.mark.parametrize("name", ["test_script", "test_sync"])
def test_accelerates_own_scripts_pass(shell: Shell, name: str) -> None:
    shell.environment.update(OFFLINE)
    command = shell.start("run", *IN_TWO, of_accelerate(name))
    assert command.wait() == 0, command.stderr + command.stdout
    assert "fresh interpreters" not in command.stderr


@pytest.mark.slow
@pytest.mark.fresh
def test_transformers_trainer_ends_with_the_same_weights_as_under_torchrun(shell: Shell) -> None:
    shell.environment.update(OFFLINE)
    here = shell.start("run", *IN_TWO, TRAINER, shell.directory / "here")
    there = shell.start_program(
        sys.executable, "-m", "torch.distributed.run", *IN_TWO, TRAINER, shell.directory / "there"
    )
    assert (here.wait(), there.wait()) == (0, 0), here.stderr + there.stderr
    assert len(endings(here.stdout)) == 2
    assert endings(here.stdout) == endings(there.stdout)
    assert "fresh interpreters" not in here.stderr, "torchrun's workers are fresh, these are forked"


@pytest.mark.slow
@pytest.mark.fresh
@pytest.mark.parametrize(
    ("strategy", "fault"), [("ddp", "kill"), ("zero3", "kill"), ("tensor", "")]
)
def test_a_gpt_of_another_package_ends_as_in_plain_torch(
    shell: Shell, strategy: str, fault: str
) -> None:
    plain = shell.start_program(sys.executable, NANO_GPT, shell.directory / "plain", "plain")
    command = shell.start("run", *IN_TWO, NANO_GPT, shell.directory / "run", strategy, fault)
    assert (plain.wait(), command.wait()) == (0, 0), plain.stderr + command.stderr + command.stdout
    assert ("ended with SIGKILL; continuing" in command.stderr) is bool(fault)
    assert "fresh interpreters" not in command.stderr
    expected, state = (torch.load(shell.directory / name / "model.pt") for name in ("plain", "run"))
    torch.testing.assert_close(state, expected, rtol=0, atol=1e-9)
