"""Runs of the Trainers' programs, each of whose processes prints its final state as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

IN_TWO = ("run", "--standalone", "--nproc-per-node", "2")
DEADLINE_S = 200.0
"""Time for three processes to import the Trainer's library, and then for a fourth."""

Alone = Callable[[str], tuple[dict[str, Any], Path]]


def received(output: str) -> list[dict[str, Any]]:
    """Returns the final states that the processes printed."""
    return [
        json.loads(line.split("told ", 1)[1]) for line in output.splitlines() if "told {" in line
    ]


def finish(command: Any) -> list[dict[str, Any]]:
    """Waits for the end of a run; asserts that it succeeded and that its workers were forked.

    The run that it is compared with used a fresh interpreter (`run_alone`).
    """
    try:
        status = command.process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        status = None
    assert status == 0, command.stderr + command.stdout
    assert "fresh interpreters" not in command.stderr
    return received(command.stdout)


def run_alone(
    program: Path,
    directory: Path,
    strategy: str,
    environment: Mapping[str, str],
    *also: str,
    cwd: Path | None = None,
) -> dict[str, Any]:
    """Runs one process without a job, which writes into `directory`; returns its final state."""
    ended = subprocess.run(
        [sys.executable, program, directory, strategy, *also],
        check=False,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stderr
    (result,) = received(ended.stdout)
    return result


def runs_alone(
    factory: pytest.TempPathFactory,
    program: Path,
    model: str,
    environment: Mapping[str, str],
    *also: str,
    cwd: Path | None = None,
) -> Alone:
    """Returns a function that runs one process without a job, once for each strategy. It returns
    the final state and the file `model` that was written. `also`: further arguments."""

    @cache
    def run(strategy: str) -> tuple[dict[str, Any], Path]:
        directory = factory.mktemp(strategy)
        return run_alone(
            program, directory, strategy, environment, *also, cwd=cwd
        ), directory / model

    return run
