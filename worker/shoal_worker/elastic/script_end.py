"""How the script of this process ended: well or badly, as far as Python tells. Asked once, while the interpreter goes down.

An uncaught exception passes through `sys.excepthook`; SystemExit does not, and its status is nowhere to be had afterwards. So whoever
asks for an exit gets a SystemExit that notes its status: `sys.exit` raises one, and so does that name in the script's main module, from
`import shoal` on, and where `exit` and `quit` look it up. Whether that was the end, rather than caught on its way, is seen by the script's
outermost frame: it has returned, or an exception left it. A SystemExit that another module raised by its name leaves no trace of its
status: it counts as bad.
"""

from __future__ import annotations

import _sitebuiltins
import dis
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, ClassVar, NoReturn


class ScriptEnd:
    """Watches from `install` on."""

    def __init__(self, account_for: Callable[[BaseException, TracebackType | None], None] = lambda error, traceback: None) -> None:
        """`account_for` is called with an uncaught exception, after its traceback was printed; the process takes its status from a
        SystemExit that it raises."""
        self._account_for = account_for
        self._uncaught: str | None = None
        self._outermost = _outermost_frame(sys._current_frames()[threading.main_thread().ident or 0])
        self._excepthook = sys.excepthook

    def install(self) -> None:
        """Hooks into uncaught exceptions and exits."""
        sys.excepthook = self._note_uncaught
        sys.exit = _exit_by
        note_exits()

    def failure(self) -> str | None:
        """Why it failed; None: it did not, or it has not ended."""
        if self._uncaught is not None:
            return self._uncaught
        running = _outermost_frame(sys._getframe()) is self._outermost  # a program that goes on after the script, such as a test's
        if not running and _has_returned(self._outermost):
            return None
        if _NotingExit.asked_for is None and not running:
            return "a module raised SystemExit by its name, so its status is not known: call sys.exit() there"
        return _NotingExit.asked_for or None

    def _note_uncaught(self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        self._uncaught = f"{kind.__name__}: {value}"
        self._excepthook(kind, value, traceback)
        self._account_for(value, traceback)


class _NotingExit(SystemExit):
    """Notes what the main thread asked for."""

    asked_for: ClassVar[str | None] = None
    """By the last one; empty: to end well; None: there was none."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if threading.current_thread() is threading.main_thread():  # elsewhere it ends the thread alone
            _NotingExit.asked_for = "" if self.code is None or self.code == 0 else f"sys.exit({self.code!r})"


_NotingExit.__name__ = _NotingExit.__qualname__ = SystemExit.__name__


def _exit_by(status: Any = None, /) -> NoReturn:
    raise _NotingExit(status)


def note_exits() -> None:
    """From now on the main module's SystemExit notes its status, and that of `exit` and `quit`.

    For when `shoal` is imported: `raise SystemExit(main())` looks the name up before it calls `main`.
    """
    for module in (sys.modules["__main__"], _sitebuiltins):
        module.__dict__.setdefault("SystemExit", _NotingExit)


def _outermost_frame(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _has_returned(frame: FrameType) -> bool:
    """A frame that has ended stands at its last instruction."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
