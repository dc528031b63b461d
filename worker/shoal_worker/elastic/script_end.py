"""How the script of this process ended: well or badly, as far as Python tells, and what of it a launcher has to know.

Asked once, while the interpreter goes down. An uncaught exception passes through `sys.excepthook`; SystemExit does not, and its status is
nowhere to be had afterwards. So `sys.exit` is wrapped to note what it was asked for; and whether that was the end, rather than caught on
its way, is seen by the script's outermost frame: it has returned, or an exception left it. A SystemExit that the script raised by itself
(`raise SystemExit(main())`, `exit(0)`) leaves no trace of its status: it counts as an end like any other. The launcher sees the status, and
the peers whether it came before theirs.

A launcher has to know what a script did from what happened to it: the one would happen again in a replacement, the other not. So a process
leaves behind an account of the exception that ended it, and of whether that is the cause of anything."""

from __future__ import annotations

import contextlib
import dis
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from traceback import format_exception
from types import FrameType, TracebackType
from typing import Any, Final, NoReturn

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


class ScriptEnd:
    """Watches from `install` on."""

    def __init__(self, account_for: Callable[[BaseException, TracebackType | None], None] = lambda error, traceback: None) -> None:
        """`account_for` is called with an uncaught exception, after its traceback was printed; the process takes its status from a
        SystemExit that it raises."""
        self._account_for = account_for
        self._uncaught: str | None = None
        self._exit: str | None = None
        """What sys.exit was last asked for; empty: to end well; None: it was not called."""
        self._outermost = _outermost_frame(sys._current_frames()[threading.main_thread().ident or 0])
        self._excepthook = sys.excepthook
        self._sys_exit = sys.exit

    def install(self) -> None:
        """Hooks into uncaught exceptions and sys.exit."""
        sys.excepthook = self._note_uncaught
        sys.exit = self._note_exit

    def failure(self) -> str | None:
        """Why it failed; None: it did not, or it has not ended."""
        if self._uncaught is not None:
            return self._uncaught
        running = _outermost_frame(sys._getframe()) is self._outermost  # a program that goes on after the script, such as a test's
        if not running and _has_returned(self._outermost):
            return None
        return self._exit or None

    def _note_uncaught(self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        self._uncaught = f"{kind.__name__}: {value}"
        self._excepthook(kind, value, traceback)
        self._account_for(value, traceback)

    def _note_exit(self, status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():  # elsewhere it ends the thread alone
            self._exit = "" if status is None or status == 0 else f"sys.exit({status!r})"
        self._sys_exit(status)


def _outermost_frame(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _has_returned(frame: FrameType) -> bool:
    """A frame that has ended stands at its last instruction."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
