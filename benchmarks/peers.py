"""Python environments of the systems with which Shoal is compared (peers). torchft and DeepSpeed
have their own environment, because their requirements differ from Shoal's. torch's `_reconfigure`
may need an environment that `make test-torch` creates."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Final

from benchmarks.errors import MeasurementError
from benchmarks.processes import REPOSITORY

PYTHON: Final = REPOSITORY / ".venv-peers" / "bin" / "python"
TORCHRUN: Final = REPOSITORY / ".venv-peers" / "bin" / "torchrun"
LIGHTHOUSE: Final = REPOSITORY / ".venv-peers" / "bin" / "torchft_lighthouse"
EXTENSIONS: Final = REPOSITORY / ".venv-peers" / "extensions"
"""Directory of the shared-memory collective that DeepSpeed compiled when it was installed.
DeepSpeed loads it although Gloo does not need it."""
_IMPORT_TIMEOUT_S: Final = 60
_FROM: Final = (2, 14)
"""First version of torch that has `_reconfigure`."""


def torchft_version() -> str:
    """Returns a text with the versions of torchft and of the torch that it uses. Raises
    MeasurementError with the reason if torchft cannot run on this machine."""
    return _version("torchft", "torchft-nightly")


def deepspeed_version() -> str:
    """Returns a text with the versions of DeepSpeed and of the torch that it uses. Raises
    MeasurementError with the reason if DeepSpeed cannot run on this machine."""
    return _version("deepspeed", "deepspeed")


def reconfiguring_python() -> tuple[Path, str]:
    """Returns an interpreter whose torch has `_reconfigure`, and the version of that torch. This is
    the current interpreter, or the newest that `make test-torch` has installed. Raises
    MeasurementError if there is none."""
    own = version("torch")
    if _number(own) >= _FROM:
        return Path(sys.executable), own
    installed = {
        folder.name.removeprefix(".venv-torch-"): folder / "bin" / "python"
        for folder in REPOSITORY.glob(".venv-torch-*")
        if (folder / "installed").exists()
    }
    newest = max(installed, key=_number, default=own)
    if _number(newest) < _FROM:
        raise MeasurementError(
            f"torch {own} has no _reconfigure, which came with 2.14: run "
            "`make .venv-torch-2.15.0/installed`"
        )
    return installed[newest], newest


def _number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.partition("+")[0].split(".")))


@functools.cache
def _version(module: str, distribution: str) -> str:
    if not PYTHON.exists():
        raise MeasurementError(f"{distribution} is not installed: run `make .venv-peers/installed`")
    program = (
        f"import importlib.metadata as m, {module}; print(m.version({distribution!r}), 'on "
        "torch', m.version('torch'))"
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    try:
        answer = subprocess.run(
            [PYTHON, "-c", program],
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise MeasurementError(
            f"{distribution} was not imported within {_IMPORT_TIMEOUT_S} s: the machine is busy"
        ) from None
    if answer.returncode:
        raise MeasurementError(
            f"{distribution} cannot be imported: {answer.stderr.strip().splitlines()[-1]}"
        )
    return answer.stdout.strip().splitlines()[-1]
