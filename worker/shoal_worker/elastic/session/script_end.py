"""Determines whether this process's script succeeded or failed, as far as Python reveals it. The
result is read once, during interpreter shutdown.

An uncaught exception passes through `sys.excepthook`. SystemExit does not, and its status is
unavailable afterwards, so `sys.exit` is wrapped to record its argument. The script's outermost
frame shows whether that call ended the script or the exception was caught: if it was caught, the
frame has returned normally. If a script raises SystemExit directly (`raise SystemExit(main())`,
`exit(0)`), its status is unknown, and the script counts as successful. The launcher does see the
status, and the peers see whether this process ended before them.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from shoal_common.system.frames import current_frames


class ScriptEnd:
    """Records how the script ends. Active after `install`."""

    def __init__(
        self,
        account_for: Callable[
            [BaseException, TracebackType | None], None
        ] = lambda error, traceback: None,
        in_backward: Callable[[], bool] = lambda: False,
        shown: Callable[
            [BaseException, TracebackType | None], str | None
        ] = lambda error, traceback: None,
    ) -> None:
        """Prepares the record, without installing its hooks.

        Args:
            account_for: called with an uncaught exception, after its traceback has been printed. If
                it raises SystemExit, the process ends with that status.
            in_backward: returns whether the calling thread is running a backward pass. On CUDA,
                autograd runs it on a separate thread, whose exceptions are raised in the thread
                that called `backward`.
            shown: returns the text to print for an uncaught exception; None: its traceback.
        """
        self._account_for = account_for
        self._shown = shown
        self._in_backward = in_backward
        self._uncaught: str | None = None
        self._exit: str | None = None
        """Last argument of sys.exit; empty: success; None: sys.exit was not called."""
        self._outermost = _outermost_frame(current_frames()[threading.main_thread().ident or 0])
        self._excepthook = sys.excepthook
        self._sys_exit = sys.exit

    def install(self) -> None:
        """Installs hooks for uncaught exceptions and sys.exit."""
        sys.excepthook = self._note_uncaught
        sys.exit = self._note_exit

    def failure(self) -> str | None:
        """Returns why the script failed; None if it succeeded or is still running."""
        if self._uncaught is not None:
            return self._uncaught
        # the program continues after the script, as a test does
        running = _outermost_frame(sys._getframe()) is self._outermost
        if not running and _has_returned(self._outermost):
            return None
        return self._exit or None

    def _note_uncaught(
        self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        self._uncaught = f"{kind.__name__}: {value}"
        # a hook installed by the script may do more than print the exception
        text = self._shown(value, traceback) if self._excepthook is sys.__excepthook__ else None
        if text is not None:
            sys.stderr.write(text)
        else:
            self._excepthook(kind, value, traceback)
        self._account_for(value, traceback)

    def _note_exit(self, status: Any = None, /) -> NoReturn:
        # in any other thread, sys.exit ends only that thread
        if threading.current_thread() is threading.main_thread() or self._in_backward():
            self._exit = "" if status is None or status == 0 else f"sys.exit({status!r})"
        self._sys_exit(status)


def _outermost_frame(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _has_returned(frame: FrameType) -> bool:
    """Returns whether a frame has returned, and is therefore at a return instruction."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
