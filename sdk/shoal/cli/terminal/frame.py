"""Creates the frames of `shoal top`: the job, its latest events, and other jobs that have not
ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import datetime
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text
from shoal_common.errors import ShoalError

from shoal.cli.terminal.view import event_line, job_view, jobs_view
from shoal.client import Client, Event, Job, JobPhase, JobSummary

_EVENTS_KEPT: Final = 200
_EVENTS_AT_LEAST: Final = 3
_EVENTS_PLAIN: Final = 10
"""Number of events in a printed frame."""


class Frames:
    """Creates a sequence of frames. Requests only the events that are new since the previous
    frame."""

    def __init__(self, client: Client, job_id: str, *, full_screen: bool) -> None:
        """`full_screen`: True to make frames as high as the terminal."""
        self._full_screen = full_screen
        self._client = client
        self._job_id = job_id
        self._job: Job | None = None
        self._jobs: tuple[JobSummary, ...] = ()
        self._events: deque[Event] = deque(maxlen=_EVENTS_KEPT)
        self._seen = ""

    def take(self) -> RenderableType:
        """Returns a new frame. While the coordinator does not respond, the frame shows the last
        known values and a note that they are outdated. Raises ShoalError if no values are known
        yet."""
        away: ShoalError | None = None
        try:
            self._job = self._client.job(self._job_id)
            self._jobs = tuple(
                each
                for each in self._client.jobs()
                if each.job_id == self._job_id or each.phase is not JobPhase.FINISHED
            )
            for event in self._client.events(self._job_id, after=self._seen):
                self._events.append(event)
                self._seen = event.event_id
        except ShoalError as error:
            if self._job is None:
                raise
            away = error
        return _Frame(
            self._job, self._jobs, list(self._events), away, full_screen=self._full_screen
        )


class _Frame:
    """Rich renderable of one frame. If it does not fit on the terminal, the oldest events are
    dropped."""

    def __init__(
        self,
        job: Job,
        jobs: tuple[JobSummary, ...],
        events: list[Event],
        away: ShoalError | None,
        *,
        full_screen: bool,
    ) -> None:
        self._full_screen = full_screen
        self._job = job
        self._jobs = jobs
        self._events = events
        self._away = away

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        above: list[RenderableType] = [self._title(options.max_width), Text(), job_view(self._job)]
        if len(self._jobs) > 1:
            above += [Text(), jobs_view(self._jobs, shown=self._job.job_id)]
        if self._events:
            above += [Text(), Text("events", style="bold")]
        yield from above
        used = len(console.render_lines(Group(*above), options.update(height=None), pad=False))
        room = (
            max(options.size.height - used, _EVENTS_AT_LEAST)
            if self._full_screen
            else _EVENTS_PLAIN
        )
        for event in self._events[-room:]:
            line = event_line(event)
            line.truncate(options.max_width, overflow="ellipsis")
            yield line

    def _title(self, width: int) -> Text:
        now = self._job.now.astimezone() if self._away is not None else datetime.now().astimezone()
        text = Text.assemble(("shoal top", "bold"), f"  {now:%H:%M:%S}", ("  q to quit", "dim"))
        if self._away is not None:
            text.append(f"  as of then: {self._away}", style="red")
        text.truncate(width, overflow="ellipsis")
        return text
