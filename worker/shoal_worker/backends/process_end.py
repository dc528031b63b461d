"""Exits this process immediately if it must not continue and its interpreter might never exit."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import NoReturn


def end_now(status: int, why: str) -> NoReturn:
    """Writes `why` to standard error instead of a traceback, and exits the process with `status`
    without running exit handlers."""
    print(f"shoal: {why}", file=sys.stderr)  # noqa: T201 - where a traceback would have been
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # standard error is closed
            stream.flush()
    os._exit(status)
