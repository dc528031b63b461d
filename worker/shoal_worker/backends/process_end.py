"""Ends this process at once, where it must not go on and its interpreter may never come to an end
by itself."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import NoReturn


def end_now(status: int, why: str) -> NoReturn:
    """Says `why` on standard error, in the place of a traceback, and ends the process with
    `status`. No exit handler runs."""
    print(f"shoal: {why}", file=sys.stderr)  # noqa: T201 - where a traceback would have been
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed
            stream.flush()
    os._exit(status)
