"""Runs the health checks of this machine in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

CHECKS_TIMEOUT: Final = timedelta(minutes=3)
"""Maximum duration of all checks of a machine. They take some seconds, most of it to import torch;
an initialization of many GPUs may take a minute."""
LARGEST_OFFSET: Final = timedelta(seconds=5)
"""Largest difference between the clocks of a machine and the coordinator. Larger ones confuse the
times in logs, and end in refused certificates."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Result of one health check."""

    name: str
    ok: bool
    detail: str
    """Measured value, or the reason of the failure, for people."""


def check_machine(timeout: timedelta = CHECKS_TIMEOUT) -> list[CheckResult]:
    """Runs all checks and returns their results. Blocks for at most `timeout`. A check that does
    not end, or that ends its process, has failed."""
    command = (sys.executable, "-P", "-m", "shoal.launcher.machines.checks", tempfile.gettempdir())
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout.total_seconds(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        results = _parse(error.stdout.decode() if isinstance(error.stdout, bytes) else "")
        what = f"did not end within {timeout.total_seconds():g} s, after {len(results)} checks"
        return [*results, CheckResult(name="all checks", ok=False, detail=what)]
    results = _parse(ended.stdout)
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        what = f"ended with status {ended.returncode} after {len(results)} checks: {last[-200:]}"
        results.append(CheckResult(name="all checks", ok=False, detail=what))
    return results


def check_clock(offset: timedelta, uncertainty: timedelta) -> CheckResult:
    """Returns the result for this machine's clock. `offset`: time of the coordinator's clock minus
    that of this machine, known up to `uncertainty`."""
    offset_s, uncertainty_s = offset.total_seconds(), uncertainty.total_seconds()
    ok = abs(offset_s) - uncertainty_s <= LARGEST_OFFSET.total_seconds()
    detail = f"the coordinator's clock differs by {offset_s:+.2f} s (within {uncertainty_s:.2f} s)"
    if not ok:
        detail += f"; expected at most {LARGEST_OFFSET.total_seconds():g} s: run an NTP client"
    return CheckResult(name="clock", ok=ok, detail=detail)


def failures_text(results: list[CheckResult]) -> str:
    """Returns the failed checks with their reasons in one line; empty if all have passed."""
    return "; ".join(f"{result.name}: {result.detail}" for result in results if not result.ok)


def _parse(output: str) -> list[CheckResult]:
    """Returns the results in the output of the checks, whose last line may be cut off."""
    return [
        CheckResult(**json.loads(line)) for line in output.splitlines() if line.endswith("}")
    ]
