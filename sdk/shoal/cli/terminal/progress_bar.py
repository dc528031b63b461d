"""Shows the progress of a run: as a bar below the workers' output on a terminal, or as occasional
plain lines in a log."""

from __future__ import annotations

import io
import math
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from shoal.launcher.report.account import Status
from shoal.launcher.workers.output import OutputPump, Stream, Writer

if TYPE_CHECKING:  # rich is loaded only when needed, after workers have started
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

_LINE_EVERY_S: Final = 30.0
_DRAW_EVERY_S: Final = 0.2
_BAR_CELLS: Final = 30
_LEAST_CELLS: Final = 10
_ERASE: Final = b"\r\x1b[2K"


class StatusLine:
    """Rich renderable of a run's progress: the text of `status_text`, and a bar if the number of
    steps is known and the terminal is wide enough."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.progress_bar import ProgressBar
        from rich.segment import Segment
        from rich.text import Text

        status, text = self._status, Text(f"{status_text(self._status)}")
        cells = min(_BAR_CELLS, options.max_width - text.cell_len - 1)
        if status.steps_in_all and cells >= _LEAST_CELLS:
            bar = ProgressBar(
                total=status.steps_in_all,
                completed=min(status.steps, status.steps_in_all),
                width=cells,
            )
            yield from console.render(bar, options.update_width(cells))
            yield Segment(" ")
        text.truncate(options.max_width, overflow="ellipsis")
        yield from text.render(console)


def status_text(status: Status) -> str:
    """Returns the progress of a run as one line of text, without a line break."""
    text = f"step {status.steps:,}"
    if status.steps_in_all:
        text += f" of {status.steps_in_all:,} ({min(1.0, status.steps / status.steps_in_all):.0%})"
    if status.left is not None and status.steps < status.steps_in_all:
        text += f", {timedelta(seconds=round(status.left.total_seconds()))} left"
    if status.samples_per_s:
        text += f", {status.samples_per_s:,.0f} samples/s"
    return text + ("" if math.isnan(status.loss) else f", loss {status.loss:.4g}")


class PlainLines:
    """Prints the progress as a line every 30 s, for logs."""

    def __init__(
        self, note: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`note`: function that writes a line."""
        self._note = note
        self._clock = clock
        self._last = clock()

    def show(self, status: Status) -> None:
        """Writes a progress line if one is due."""
        if self._clock() >= self._last + _LINE_EVERY_S:
            self._last = self._clock()
            self._note(status_text(status))


class BarWriter:
    """Writer for an output pump that keeps a progress bar on the terminal's last line.

    All methods except `show` run on the pump's thread, so that the bar never splits a worker's
    line. If lines overwrite each other (a worker's own bars), only the last one is shown.
    """

    def __init__(self, write: Writer) -> None:
        """`write`: writes output to the terminal. Standard error must be a terminal."""
        self._write = write
        self._pump: OutputPump | None = None
        self._bar = b""
        self._is_drawn = False
        self._last = 0.0

    def on(self, pump: OutputPump) -> None:
        """Starts showing the bar. `pump`: the output pump that uses this writer."""
        self._pump = pump

    def write(self, stream: Stream, data: bytes) -> None:
        """Writes output above the bar. Implements `Writer`."""
        if not stream.is_terminal:
            self._write(stream, data)
            return
        whole = b"".join(line for line in data.splitlines(keepends=True) if line.endswith(b"\n"))
        if whole:
            self._erase()
            self._write(stream, whole)
            self._draw()

    def show(self, status: Status) -> None:
        """Redraws the bar, at most a few times per second."""
        if self._pump is None or time.monotonic() < self._last + _DRAW_EVERY_S:
            return
        self._last = time.monotonic()
        bar = _bar(status, _width())

        def draw() -> None:
            self._erase()
            self._bar = bar
            self._draw()

        self._pump.order(draw)

    def end(self) -> None:
        """Removes the bar permanently."""

        def erase() -> None:
            self._erase()
            self._bar = b""

        if self._pump is not None:
            self._pump.order(erase)
            self._pump = None

    def _erase(self) -> None:
        if self._is_drawn:
            self._write(Stream.ERR, _ERASE)
            self._is_drawn = False

    def _draw(self) -> None:
        if self._bar:
            self._write(Stream.ERR, self._bar)
            self._is_drawn = True


def _width() -> int:
    try:
        return os.get_terminal_size(Stream.ERR).columns
    except OSError:
        return 80


def _bar(status: Status, width: int) -> bytes:
    """Returns the bar as one colored line, short enough not to be wrapped by the terminal."""
    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        force_terminal=True,
        width=max(1, width - 1),
        legacy_windows=False,
        highlight=False,
    )
    with console.capture() as capture:
        console.print(StatusLine(status), end="")
    return capture.get().replace("\n", "").encode()
