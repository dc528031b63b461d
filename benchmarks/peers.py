"""The peers' environment: torchft and DeepSpeed have a virtual environment of their own, apart from
Shoal's requirements."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

from benchmarks.errors import MeasurementError
from benchmarks.processes import REPOSITORY

PYTHON: Final = REPOSITORY / ".venv-peers" / "bin" / "python"
TORCHRUN: Final = REPOSITORY / ".venv-peers" / "bin" / "torchrun"
LIGHTHOUSE: Final = REPOSITORY / ".venv-peers" / "bin" / "torchft_lighthouse"
EXTENSIONS: Final = REPOSITORY / ".venv-peers" / "extensions"
"""The shared-memory collective that DeepSpeed compiled when it was installed, and wants to load
although Gloo needs none."""
_IMPORT_TIMEOUT_S: Final = 60
_FROM: Final = (2, 14)
"""Version of torch with which `_reconfigure` came."""


def torchft_version() -> str:
    """Version of torchft and of its torch. Raises MeasurementError, saying why it cannot run
    here."""
    return _version("torchft", "torchft-nightly")


def deepspeed_version() -> str:
    """Version of DeepSpeed and of its torch. Raises MeasurementError, saying why it cannot run
    here."""
    return _version("deepspeed", "deepspeed")


@functools.cache
def reconfiguring_python() -> tuple[Path, str]:
    """Returns an interpreter whose torch has `_reconfigure`, and that torch's version: this one, or
    the newest that `make test-torch` has installed. Raises MeasurementError if there is none."""
    installed = {sys.executable: metadata.version("torch")}
    for python in REPOSITORY.glob(".venv-torch-*/bin/python"):
        if (python.parent.parent / "installed").exists():
            installed[str(python)] = python.parent.parent.name.removeprefix(".venv-torch-")
    able = {path: version for path, version in installed.items() if _number(version) >= _FROM}
    if sys.executable in able:
        return Path(sys.executable), able[sys.executable]
    if not able:
        raise MeasurementError(
            f"torch {installed[sys.executable]} has no _reconfigure, which came with 2.14: run "
            "`make .venv-torch-2.15.0/installed`"
        )
    newest = max(able, key=lambda path: _number(able[path]))
    return Path(newest), able[newest]


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.partition("+")[0].split(".")))


@functools.cache
def _version(module: str, distribution: str) -> str:
    if not PYTHON.exists():
        raise MeasurementError(f"{distribution} is not installed: run `make .venv-peers/installed`")
    program = (
        f"import importlib.metadata as m, {module}; print(m.version({distribution!r}), 'on "
        "torch', m.version('torch'))"
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    answer = subprocess.run(
        [PYTHON, "-c", program],
        capture_output=True,
        text=True,
        timeout=_IMPORT_TIMEOUT_S,
        check=False,
        env=environment,
    )
    if answer.returncode:
        raise MeasurementError(
            f"{distribution} cannot be imported: {answer.stderr.strip().splitlines()[-1]}"
        )
    return answer.stdout.strip().splitlines()[-1]
