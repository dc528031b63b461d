"""Follows a run in progress: reads its workers' tallies several times a second, and requests events
from the coordinator.

The follower runs on the launcher's event loop; its requests run on a thread. It makes no decisions,
and its errors do not fail the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shoal_common.errors import ShoalError
from shoal_common.formats.tally import read_tally

from shoal.launcher.processes.process import ExitStatus
from shoal.launcher.report.account import RunAccount, Status

if TYPE_CHECKING:
    from shoal.launcher.report.changes import JobEvent

_LOOK_S: Final = 0.2
_LAST_QUESTION: Final = timedelta(seconds=2)

Ask = Callable[[str], Awaitable[Sequence["JobEvent"]]]
"""Function that returns the events after the event with a given id. Raises ShoalError."""
Show = Callable[[Status], None]


class RunFollower:
    """Reads the progress of one run while it is in progress."""

    def __init__(
        self,
        *,
        note: Callable[[str], None],
        show: Show | None = None,
        notes_stalls: bool = False,
    ) -> None:
        """`note`: callback that shows a message to the user. `show`: callback that receives the
        progress of the run. `notes_stalls`: True to show which rank a stalled step waits for,
        because the log of the first worker, which says so too, is not shown."""
        self.account = RunAccount()
        self._note = note
        self._notes_stalls = notes_stalls
        self._show = show
        self._files: dict[str, Path] = {}
        self._endings: dict[str, str] = {}

    def started(self, member_id: str, tally: Path) -> None:
        """Adds a worker that was started. `tally`: file with the worker's counts of its commits."""
        self._files[member_id] = tally

    def ended(self, member_id: str, status: ExitStatus) -> None:
        """Records the end of a worker's process."""
        self._endings[member_id] = f"ended with {status}"

    def interrupted(self) -> None:
        """Records that a signal is ending the run on this machine, so that its workers leave."""
        self.account.changes.interrupted = frozenset(self._files.keys() - self._endings.keys())

    def of_run(self, number: int) -> None:
        """Sets the number of the run that this launcher takes part in."""
        self.account.changes.run = number

    async def follow(self, ask: Ask) -> None:
        """Follows the run until cancelled. `ask`: function that requests events from the
        coordinator."""
        while True:
            self.look()
            if self.account.wants_events(time.monotonic_ns()):
                await self._explain(ask)
            await asyncio.sleep(_LOOK_S)

    async def finish(self, ask: Ask | None) -> None:
        """Reads the remaining commits and events after all workers have exited. `ask`: function
        that requests events from the coordinator; None if the coordinator cannot be asked."""
        self.look(settle=True)
        if ask is not None and self.account.course.has_begun:
            try:
                async with asyncio.timeout(_LAST_QUESTION.total_seconds()):
                    await self._explain(ask)
            except TimeoutError:
                pass

    def look(self, *, settle: bool = False) -> None:
        """Reads the tallies of all workers. `settle`: True if the workers will not write any
        more."""
        tallies = {
            name: tally
            for name, path in self._files.items()
            if (tally := read_tally(path)) is not None
        }
        self.account.take(tallies, time.monotonic_ns(), settle=settle)
        for name in self._endings.keys() & self._files.keys() if not settle else ():
            if name in tallies or not self._files[name].exists():
                # the worker will not commit any more steps, and the course keeps its counts
                del self._files[name]
        if self._show is not None and not settle and (status := self.account.status) is not None:
            self._show(status)

    async def _explain(self, ask: Ask) -> None:
        try:
            events = await ask(self.account.changes.newest_event)
        except ShoalError:
            events = ()  # the coordinator is unreachable; the next pass asks again
        run = self.account.changes.run
        for event in events if self._notes_stalls else ():
            if event.kind == "step_stands" and run in (0, event.run):
                self._note(event.attributes["reason"])
        for line in self.account.explain(events, self._endings, time.monotonic_ns()):
            self._note(line)
