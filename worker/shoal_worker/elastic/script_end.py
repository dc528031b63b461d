"""How the script of this process ended: well or badly, as far as Python tells. Asked once, while
the interpreter goes down.

An uncaught exception passes through `sys.excepthook`; SystemExit does not, and its status is
nowhere to be had afterwards. So `sys.exit` is wrapped to note what it was asked for; and whether
that was the end, rather than caught on its way, is seen by the script's outermost frame: it has
returned, or an exception left it. A SystemExit that the script raised by itself
(`raise SystemExit(main())`, `exit(0)`) leaves no trace of its status: it counts as an end like any
other. The launcher sees the status, and the peers whether it came before theirs.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from shoal_worker.elastic.brief_errors import HINT, brief


class ScriptEnd:
    """Watches from `install` on."""

    def __init__(
        self,
        account_for: Callable[
            [BaseException, TracebackType | None], None
        ] = lambda error, traceback: None,
        in_backward: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        account_for: called with an uncaught exception, after its traceback was printed; the process
            takes its status from a SystemExit that it raises.
        in_backward: whether the calling thread runs a backward pass. On CUDA that is a thread of
            autograd's, whose exceptions are raised in the thread that called `backward`.
        """
        self._account_for = account_for
        self._in_backward = in_backward
        self._uncaught: str | None = None
        self._exit: str | None = None
        """What sys.exit was last asked for; empty: to end well; None: it was not called."""
        self._outermost = _outermost_frame(
            sys._current_frames()[threading.main_thread().ident or 0]
        )
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
        # a program that goes on after the script, such as a test's
        running = _outermost_frame(sys._getframe()) is self._outermost
        if not running and _has_returned(self._outermost):
            return None
        return self._exit or None

    def _note_uncaught(
        self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        self._uncaught = f"{kind.__name__}: {value}"
        # a hook of the script's own may do more than print
        text = brief(value, traceback) if self._excepthook is sys.__excepthook__ else None
        if text is not None:
            sys.stderr.write(text + HINT)
        else:
            self._excepthook(kind, value, traceback)
        self._account_for(value, traceback)

    def _note_exit(self, status: Any = None, /) -> NoReturn:
        # Elsewhere it ends the thread alone.
        if threading.current_thread() is threading.main_thread() or self._in_backward():
            self._exit = "" if status is None or status == 0 else f"sys.exit({status!r})"
        self._sys_exit(status)


def _outermost_frame(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _has_returned(frame: FrameType) -> bool:
    """A frame that has ended stands at its last instruction."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
