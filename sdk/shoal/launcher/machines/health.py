"""Runs the health checks of this machine in a separate process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

CHECKS_TIMEOUT: Final = timedelta(minutes=3)
"""Maximum total duration of all checks. They take a few seconds, mostly to import torch;
initializing many GPUs may take a minute."""
LARGEST_OFFSET: Final = timedelta(seconds=5)
"""Largest acceptable difference between the clocks of a machine and the coordinator. With larger
differences, times in logs are misleading and certificates may be rejected as not yet valid."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Result of one health check."""

    name: str
    ok: bool
    detail: str
    """Human-readable measured value or, if the check failed, the reason."""


async def check_machine(timeout: timedelta = CHECKS_TIMEOUT) -> list[CheckResult]:
    """Runs all checks and returns their results. A check that does not finish within the total
    `timeout`, or that crashes its process, counts as failed. If this coroutine is cancelled, the
    checks are killed."""
    # in memory, since the disk of temporary files may be the defective part
    with os.fdopen(os.memfd_create("shoal-health"), "w+b") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "shoal.launcher.machines.checks", _temporary_directory()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C must not reach the checks
        )
        assert process.stdout is not None, "a pipe was requested"
        results: list[CheckResult] = []
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                async for line in process.stdout:
                    results.append(CheckResult(**json.loads(line)))
                status = await process.wait()
        except TimeoutError:
            what = (
                f"the checks did not end within {timeout.total_seconds():g} s; {len(results)} had "
                "completed"
            )
            return [*results, CheckResult(name="all checks", ok=False, detail=what)]
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if status != 0:
            errors.seek(0)
            last = (errors.read().decode(errors="replace").splitlines() or ["no output"])[-1]
            what = (
                f"the process ended with status {status} after {len(results)} checks: {last[-200:]}"
            )
            results.append(CheckResult(name="all checks", ok=False, detail=what))
        return results


def _temporary_directory() -> str:
    """Returns the directory for temporary files, even if files cannot be written there."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # no directory is writable; the check will report the reason
        return os.environ.get("TMPDIR", "/tmp")  # noqa: S108


def check_clock(offset: timedelta, uncertainty: timedelta) -> CheckResult:
    """Checks this machine's clock. `offset`: coordinator's clock minus this machine's clock.
    `uncertainty`: maximum error of `offset`."""
    offset_s, uncertainty_s = offset.total_seconds(), uncertainty.total_seconds()
    ok = abs(offset_s) - uncertainty_s <= LARGEST_OFFSET.total_seconds()
    detail = (
        f"the coordinator's clock minus this machine's is {offset_s:+.2f} s (+- "
        f"{uncertainty_s:.2f} s)"
    )
    if not ok:
        detail += f"; expected at most {LARGEST_OFFSET.total_seconds():g} s: run an NTP client"
    return CheckResult(name="clock", ok=ok, detail=detail)


def failures_text(results: list[CheckResult]) -> str:
    """Returns one line with the failed checks and their reasons; empty if all checks passed."""
    return "; ".join(f"{result.name}: {result.detail}" for result in results if not result.ok)
