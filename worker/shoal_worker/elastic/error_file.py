"""What a process leaves behind about the exception that ended it, and whether that exception is the cause of anything.

A launcher has to know what a script did from what happened to it: the one would happen again in a replacement, the other not.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from traceback import format_exception
from types import TracebackType
from typing import Final

from shoal_common.errors import MembershipChanged, ShoalError, StaleGenerationError, UnavailableError
from shoal_common.exit_status import PUT_OUT

from shoal_worker.elastic.current import find_session
from shoal_worker.settings import error_file

_HAPPENED: Final = ("MEMBER_REPLACED", "LEASE_EXPIRED", "PROCESS_EXITED", "MEMBER_STALLED", UnavailableError.default_reason)
"""Reasons with which the coordinator ends the membership of a process that lives, and that of a service that cannot be reached."""


_VERDICTS: Final = ("RANKS_DIVERGED", "REPLICAS_DIVERGED")
"""Reasons that say what the scripts, or the machines, did. They may come out of a failed collective, but the next one would fail alike."""


def is_consequence(error: BaseException) -> bool:
    """Whether this exception, or one that led to it, says that peers or services went away, or that this process was put out."""
    chain = list(_chain(error))
    if any(isinstance(cause, ShoalError) and cause.reason in _VERDICTS for cause in chain):
        return False
    return any(
        isinstance(cause, MembershipChanged | StaleGenerationError) or (isinstance(cause, ShoalError) and cause.reason in _HAPPENED)
        for cause in chain
    )


def account_for(error: BaseException, traceback: TracebackType | None) -> None:
    """Deals with an uncaught exception. One that only tells what happened to others ends the process with PUT_OUT; of any other, an account
    is left for the launcher.

    Raises:
        SystemExit: status PUT_OUT.
    """
    if is_consequence(error):
        raise SystemExit(PUT_OUT)
    leave_account(error, traceback)


def leave_account(error: BaseException, traceback: TracebackType | None) -> None:
    """Writes the exception where torchrun's workers do (TORCHELASTIC_ERROR_FILE), in the same form, if a launcher has named a file."""
    path = error_file()
    if path is None:
        return
    now = time.time()
    failed_at = [cause.failed_at for cause in _chain(error) if isinstance(cause, ShoalError) and cause.failed_at is not None]
    session = find_session()
    text = "".join(format_exception(type(error), error, traceback))
    extra = {"py_callstack": text, "timestamp": str(int(now))}
    content = {
        "message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra},
        "shoal": {"rank": session.rank if session is not None else -1, "unix_s": min([now, *failed_at])},
    }
    with contextlib.suppress(OSError):  # a full disk, say: the traceback is on standard error already
        path.write_text(json.dumps(content))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
