"""Shortens Shoal's errors for users: only the error message and the lines of the script that led to
it remain.

Shoal's own lines do not help to find a mistake in a script. `SHOAL_FULL_TRACEBACKS=1` shows them.
"""

from __future__ import annotations

import traceback as tracebacks
from contextlib import suppress
from types import TracebackType

from shoal_common.errors import ConfigurationError, InternalError, ShoalError

from shoal_worker.elastic.coordinator.script_lines import libraries
from shoal_worker.settings import WorkerSettings, error_file

_HINT = "(SHOAL_FULL_TRACEBACKS=1 shows Shoal's own lines as well)\n"


def brief(error: BaseException, traceback: TracebackType | None) -> str | None:
    """Returns the error's message and traceback, without the lines of libraries. Returns None if
    the full traceback is needed: for an exception of a different package, a bug in Shoal, or an
    error whose traceback contains no line of the script."""
    if not isinstance(error, ShoalError) or isinstance(error, InternalError):
        return None
    with suppress(ConfigurationError):  # reading it may itself raise the error to be shown
        if WorkerSettings.load().full_tracebacks:
            return None
    foreign = libraries()
    lines = [
        frame
        for frame in tracebacks.extract_tb(traceback)
        if not frame.filename.startswith(foreign)
    ]
    if not lines:
        return None
    return f"{type(error).__name__}: {error}\n" + "".join(tracebacks.format_list(lines))


def on_screen(error: BaseException, traceback: TracebackType | None) -> str | None:
    """Returns the result of `brief`, followed by a line that explains how to see the full
    traceback. If every rank raises the error, `shoal run` shows it at the end; then returns one
    line without the message."""
    text = brief(error, traceback)
    if text is None:
        return None
    if isinstance(error, ShoalError) and error.on_all_ranks and _is_shown_at_the_end():
        return f"{type(error).__name__} [{error.reason}] on all ranks: see the end of the output\n"
    return text + _HINT


def _is_shown_at_the_end() -> bool:
    """Returns whether `shoal run` has started this worker, and shows its error."""
    return bool(WorkerSettings.load().launcher_id) and error_file() is not None
