"""The peers' environment: torchft has a virtual environment of its own, so that its requirements and Shoal's stay apart."""

from __future__ import annotations

import functools
import subprocess
from typing import Final

from benchmarks.errors import MeasurementError
from benchmarks.processes import REPOSITORY

PYTHON: Final = REPOSITORY / ".venv-peers" / "bin" / "python"
LIGHTHOUSE: Final = REPOSITORY / ".venv-peers" / "bin" / "torchft_lighthouse"
_IMPORT_TIMEOUT_S: Final = 60
_VERSIONS: Final = "import importlib.metadata as m, torchft; print(m.version('torchft-nightly'), 'on torch', m.version('torch'))"


@functools.cache
def torchft_version() -> str:
    """Version of torchft and of its torch. Raises MeasurementError, saying why it cannot run here."""
    if not PYTHON.exists():
        raise MeasurementError("torchft is not installed: run `make .venv-peers/installed`")
    answer = subprocess.run([PYTHON, "-c", _VERSIONS], capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False)
    if answer.returncode:
        raise MeasurementError(f"torchft cannot be imported: {answer.stderr.strip().splitlines()[-1]}")
    return answer.stdout.strip()
