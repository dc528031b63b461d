"""Runs of the Trainers' programs, which say as JSON what each process ended with."""

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
"""Three processes import the Trainer's library, and then a fourth."""

Alone = Callable[[str], tuple[dict[str, Any], Path]]


def told(output: str) -> list[dict[str, Any]]:
    """Returns what the processes say that they ended with."""
    return [
        json.loads(line.split("told ", 1)[1]) for line in output.splitlines() if "told {" in line
    ]


def finish(command: Any) -> list[dict[str, Any]]:
    """Waits for the end of a run, and asserts that it succeeded and that its workers were forked.

    What it is compared with ran in a fresh interpreter (`run_alone`).
    """
    try:
        status = command.process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        status = None
    assert status == 0, command.stderr + command.stdout
    assert "fresh interpreters" not in command.stderr
    return told(command.stdout)


def run_alone(
    program: Path,
    directory: Path,
    strategy: str,
    environment: Mapping[str, str],
    *also: str,
    cwd: Path | None = None,
) -> dict[str, Any]:
    """Returns what one process without a job ends with, which writes into `directory`."""
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
    (result,) = told(ended.stdout)
    return result


def runs_alone(
    factory: pytest.TempPathFactory,
    program: Path,
    model: str,
    environment: Mapping[str, str],
    *also: str,
    cwd: Path | None = None,
) -> Alone:
    """Returns what one process without a job ends with, by strategy, and the file `model` that it
    writes; each is run once. `also`: further arguments."""

    @cache
    def run(strategy: str) -> tuple[dict[str, Any], Path]:
        directory = factory.mktemp(strategy)
        return run_alone(
            program, directory, strategy, environment, *also, cwd=cwd
        ), directory / model

    return run
