"""Reads single keys from the terminal on standard input."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from types import TracebackType
from typing import Self


class Keys:
    """Context manager that reads keys as soon as they are pressed, without echo. Ctrl-C still
    raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._fd)

    def wait(self, timeout_s: float) -> str:
        """Returns the next key; empty if no key was pressed within `timeout_s`. If the terminal is
        closed, returns Ctrl-D."""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return ""
        return os.read(self._fd, 1).decode(errors="replace") or "\x04"

    def __enter__(self) -> Self:
        tty.setcbreak(self._fd)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
