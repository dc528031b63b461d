"""Merges the output of many processes on one terminal, as complete lines with the worker's rank as
prefix, and writes it to one file per process.

One thread, the pump, reads all pipes and writes all output, so a stopped terminal (Ctrl-S, `less`)
blocks only the output of the workers. The pump owns the sources; `attach` and `finish` may be
called from any thread and pass work to the pump.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import IO, Final

from shoal_common.errors import DeadlineError

_READ_SIZE: Final = 1 << 16
_LONGEST_LINE: Final = 1 << 20
_SILENT_S: Final = 5.0
"""Seconds that `OutputPump.close` waits for the terminal before it says so."""
_COLOURS: Final = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)
_ERASE_LINE: Final = b"\x1b[K"


class Stream(IntEnum):
    """One of the launcher's output streams. The value is the file descriptor."""

    OUT = 1
    ERR = 2

    @property
    def is_terminal(self) -> bool:
        return os.isatty(self)


Writer = Callable[[Stream, bytes], None]
"""Function that writes complete lines. Called on the pump's thread."""


class LineSplitter:
    """Splits a stream of bytes into lines. A carriage return also ends a line, so that progress
    bars are shown as they change."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines completed by `data`, including their line ends. Splits lines of more
        than 1 MiB."""
        lines = (self._rest + data).splitlines(keepends=True)
        # A final carriage return may be the first half of \r\n.
        self._rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        if len(self._rest) >= _LONGEST_LINE:
            lines.append(self._rest + b"\n")
            self._rest = b""
        return [line for line in lines if line != b"\r"]

    def flush(self) -> list[bytes]:
        """Returns the unfinished last line, if any, followed by a line break."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [rest + b"\n"] if rest else []


@dataclass(kw_only=True)
class Source:
    """A pipe of one process, and the destinations of its lines."""

    pipe: IO[bytes]
    stream: Stream
    prefix: bytes
    """Text before each line on the console."""
    console: bool
    """True if the lines appear on the console."""
    file: Path | None
    """File that receives every byte, without prefixes; None: no file."""
    splitter: LineSplitter = field(default_factory=LineSplitter)
    log: IO[bytes] | None = None


def rank_prefix(rank: int, *, colour: bool) -> bytes:
    """Returns the text before a worker's lines, e.g. `[3]: `. `colour`: True to give each rank its
    own color, for a terminal."""
    if not colour:
        return b"[%d]: " % rank
    return b"\x1b[%dm[%d]:\x1b[0m " % (_COLOURS[rank % len(_COLOURS)], rank)


class TerminalStuckError(DeadlineError):
    """Raised if the terminal does not accept output, because it is stopped (Ctrl-S) or is not being
    read."""

    default_reason = "TERMINAL_STUCK"


class ConsoleWriter:
    """Writes to this process's standard output and error, bypassing Python's buffers. If the reader
    of a stream has exited, output to it is dropped, since losing the terminal must not stop the
    training."""

    def __init__(self) -> None:
        self._gone: set[Stream] = set()
        self._returned = dict.fromkeys(Stream, False)
        self._terminal = {stream: stream.is_terminal for stream in Stream}

    def __call__(self, stream: Stream, data: bytes) -> None:
        if stream in self._gone:
            return
        if self._terminal[stream] and self._returned[stream]:
            data = _ERASE_LINE + data
        self._returned[stream] = data.endswith(b"\r")
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(stream, rest) :]
        except OSError:
            self._gone.add(stream)


class OutputPump:
    """Thread that copies the output of processes. Must be closed after the last process has
    exited."""

    def __init__(self, write: Writer) -> None:
        self._writer = write
        self._written_at = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="shoal-output", daemon=True)
        self._thread.start()

    @property
    def quiet_s(self) -> float:
        """Seconds since the last output on the console, or since the start."""
        return time.monotonic() - self._written_at

    def attach(self, source: Source) -> None:
        """Takes ownership of a pipe and starts copying its output. Raises OSError if the log file
        cannot be created."""
        os.set_blocking(source.pipe.fileno(), False)
        if source.file is not None:
            source.file.parent.mkdir(parents=True, exist_ok=True)
            source.log = source.file.open("ab", buffering=0)
        self.order(lambda: self._register(source))

    def finish(self, source: Source) -> None:
        """Copies the remaining data in the pipe of a process that has exited, and closes the pipe.

        Does not wait until all writers have closed the pipe, since a descendant of the dead process
        may keep it open.
        """
        self.order(lambda: self._end(source))

    def say(self, text: str) -> None:
        """Writes a line of the launcher itself to standard error, after all output scheduled so
        far."""
        self.order(lambda: self._write(Stream.ERR, text.encode()))

    def order(self, order: Callable[[], None]) -> None:
        """Schedules a call to `order` on the pump's thread, after all previously scheduled
        calls."""
        self._orders.put(order)
        os.eventfd_write(self._wakeup, 1)

    def close(self, timeout: timedelta, *, tell: Callable[[str], None] = lambda text: None) -> None:
        """Copies the remaining output and stops the thread. Raises TerminalStuckError if the
        terminal does not accept the output in time. `tell`: shows a message to the user about a
        long wait; it must not block."""
        timeout_s = timeout.total_seconds()
        self.order(self._begin_closing)
        self._thread.join(min(_SILENT_S, timeout_s))
        if self._thread.is_alive() and timeout_s > _SILENT_S:
            left_s = timeout_s - _SILENT_S
            tell(
                f"the run has ended; waiting up to {left_s:g} s for the terminal to accept the "
                "workers' last output"
            )
            self._thread.join(left_s)
        if self._thread.is_alive():
            raise TerminalStuckError(
                f"the terminal did not accept the workers' last output within {timeout_s:g} s"
            )
        os.close(self._wakeup)
        self._selector.close()

    # ---------------------------------------------------------------------------- the pump's thread

    def _write(self, stream: Stream, data: bytes) -> None:
        self._writer(stream, data)
        self._written_at = time.monotonic()

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                if key.data is None:
                    os.eventfd_read(self._wakeup)
                    self._obey()
                elif (
                    not key.data.pipe.closed
                ):  # a call in this iteration may have closed the source
                    self._move(key.data)

    def _obey(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._orders.get_nowait()()

    def _begin_closing(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._end(key.data)
        self._closing = True

    def _register(self, source: Source) -> None:
        self._selector.register(source.pipe, selectors.EVENT_READ, source)

    def _end(self, source: Source) -> None:
        while not source.pipe.closed and self._move(source):
            pass
        if not source.pipe.closed:
            self._release(source)

    def _move(self, source: Source) -> bool:
        """Reads from the source once and copies the data. Returns False if no more data is
        currently available. If its pipe has reached end of file, releases the source and returns
        False."""
        try:
            data = os.read(source.pipe.fileno(), _READ_SIZE)
        except BlockingIOError:
            return False
        if not data:
            self._release(source)
            return False
        self._deliver(source, data, source.splitter.feed(data))
        return True

    def _release(self, source: Source) -> None:
        self._deliver(source, b"", source.splitter.flush())
        self._selector.unregister(source.pipe)
        source.pipe.close()
        if source.log is not None:
            source.log.close()

    def _deliver(self, source: Source, data: bytes, lines: list[bytes]) -> None:
        if source.log is not None and data:
            self._log(source, source.log, data)
        if source.console and lines:
            self._write(source.stream, b"".join(source.prefix + line for line in lines))

    def _log(self, source: Source, log: IO[bytes], data: bytes) -> None:
        try:
            log.write(data)
        except OSError as error:
            source.log = None
            log.close()
            self._write(
                Stream.ERR,
                f"shoal: cannot write to {source.file}, which receives no more output: "
                f"{error}\n".encode(),
            )
