"""How the script of this process ended: well or badly, as far as Python tells. Asked once, while the interpreter goes down.

An uncaught exception passes through `sys.excepthook`; SystemExit does not, and its status is nowhere to be had afterwards. So `sys.exit` is
wrapped to note what it was asked for; and whether that was the end, rather than caught on its way, is seen by the script's outermost frame:
it has returned, or an exception left it. A SystemExit that the script raised by itself leaves no trace of its status: it counts as bad.
"""

from __future__ import annotations

import dis
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, NoReturn

from shoal_common.exit_status import PUT_OUT

from shoal_worker.elastic.account import is_consequence, leave_account


class ScriptEnd:
    """Watches from `install` on. An exception that only tells what happened to others ends the process with PUT_OUT; of any other, an
    account is left for the launcher."""

    def __init__(self) -> None:
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
        if self._exit is None and not running:
            return "SystemExit was raised without sys.exit(), so its status is not known"
        return self._exit or None

    def _note_uncaught(self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        self._uncaught = f"{kind.__name__}: {value}"
        self._excepthook(kind, value, traceback)
        if is_consequence(value):
            raise SystemExit(PUT_OUT)  # the interpreter takes its status from a hook that raises it
        leave_account(value, traceback)

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
