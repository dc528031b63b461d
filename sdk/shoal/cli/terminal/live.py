"""Live table of `shoal up`: the job's state below the workers' scrolling output.

A separate thread polls the coordinator twice a second, and the output pump's thread prints the
workers' lines. rich's lock synchronizes the two.
"""

from __future__ import annotations

import io
import sys
import threading
from datetime import timedelta
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from shoal.launcher.report.account import Status
from shoal.launcher.workers.output import Stream, TerminalStuckError, Writer

_INTERVAL_S: Final = 0.5
_LAST_TABLE_TIMEOUT: Final = timedelta(seconds=20)
"""Maximum time to wait until the last table has been printed. It exceeds the timeout of the request
to the coordinator that the table may be waiting for."""


class LiveView:
    """Context manager that shows a live table on the terminal."""

    def __init__(self, coordinator: str, job_id: str, *, fallback: Writer, progress: bool) -> None:
        """`fallback`: writes to streams that are not terminals. `progress`: True to show the run's
        progress below the table once `show` is called."""
        self._coordinator = coordinator
        self._job_id = job_id
        self._fallback = fallback
        # Characters missing in this terminal's encoding become question marks: an error would
        # terminate the pump's thread, and workers would block on full pipes.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        self._console = Console()
        self._live = Live(
            Text("starting", style="dim"), console=self._console, auto_refresh=False, transient=True
        )
        """Live display, transient until there is content worth keeping."""
        self._progress = progress
        self._status: Status | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="shoal-live", daemon=True)

    def write(self, stream: Stream, data: bytes) -> None:
        """Prints workers' lines above the table; thread-safe. If lines overwrite each other
        (progress bars), only the last one is printed, since the table separates them."""
        if not stream.is_terminal:
            self._fallback(stream, data)
            return
        whole = b"".join(line for line in data.splitlines(keepends=True) if line.endswith(b"\n"))
        if whole:
            # rich shows nothing for a line that ends with \r\n
            lines = whole.replace(b"\r\n", b"\n")
            text = Text.from_ansi(lines.decode(errors="replace").removesuffix("\n"))
            self._console.print(text, soft_wrap=True)

    def show(self, status: Status) -> None:
        """Sets the progress to show below the table when it is next redrawn. May be called from any
        thread."""
        self._status = status

    def __enter__(self) -> Self:
        self._live.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed.set()
        if isinstance(error, TerminalStuckError):
            return  # further output would fail too
        self._thread.join(_LAST_TABLE_TIMEOUT.total_seconds())
        if self._thread.is_alive():
            raise TerminalStuckError(
                "the terminal did not accept the last table within "
                f"{_LAST_TABLE_TIMEOUT.total_seconds():g} s"
            )
        self._live.stop()

    def _follow(self) -> None:
        from shoal_common.errors import ShoalError
        from shoal_common.rpc.channel import ChannelSettings

        from shoal.cli.terminal.progress_bar import StatusLine
        from shoal.cli.terminal.view import job_view
        from shoal.client import Client

        with Client(ChannelSettings(address=self._coordinator, attempts=1)) as client:
            while not self._closed.wait(_INTERVAL_S):
                try:
                    job = client.job(self._job_id)
                except ShoalError:
                    # Not started yet, or temporarily unreachable: known values stay on the screen.
                    continue
                status = self._status if self._progress else None
                self._live.update(
                    job_view(job) if status is None else Group(job_view(job), StatusLine(status)),
                    refresh=True,
                )
                self._live.transient = False
