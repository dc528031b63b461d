"""The peers' environment: torchft and DeepSpeed have a virtual environment of their own, apart from
Shoal's requirements."""

from __future__ import annotations

import functools
import os
import subprocess
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


def torchft_version() -> str:
    """Version of torchft and of its torch. Raises MeasurementError, saying why it cannot run
    here."""
    return _version("torchft", "torchft-nightly")


def deepspeed_version() -> str:
    """Version of DeepSpeed and of its torch. Raises MeasurementError, saying why it cannot run
    here."""
    return _version("deepspeed", "deepspeed")


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
