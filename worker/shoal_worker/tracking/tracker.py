"""Reports a run's progress to sinks: each step once, from one rank at a time.

Every rank follows the run, and the first rank writes. When the ranks change, another rank may
become the first: it opens the sinks and continues with the next step, and the previous first rank
closes its own sinks. When steps are repeated (a resume, a return to a checkpoint), the sinks are
reopened at the first of these steps, which invalidates their data of this and later steps. If a
rank is killed, unflushed data is lost.

Everything runs on the training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from shoal_common.errors import ConfigurationError

from shoal_worker.elastic.session.session import Session

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedRun:
    """Identifies a run to a sink, independent of the writing rank and of resumes."""

    job: str
    """Name of the job, for people; empty if it has none."""
    key: str
    """Unique key of the run."""

    @classmethod
    def of(cls, session: Session) -> Self:
        """Returns the run of a session."""
        settings, key = session.settings, session.run
        if session.is_asynchronous or not key:
            # workers of async_sgd begin at any time; or the run restarted over what it had saved
            # before
            key = f"{settings.job_id} {settings.run}"
        return cls(job=settings.job_id if session.elastic else "", key=key)


class Sink(Protocol):
    """Destination of a run's progress. The writing rank opens the sink; when another rank becomes
    the writer, that rank opens its own sink."""

    def open(self, *, run: TrackedRun, step: int) -> None:
        """Opens the sink and invalidates existing data of this and later steps. `run`: the same for
        every opening."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the numbers of one step."""

    def event(self, step: int, text: str) -> None:
        """Writes the text of an event, for people. `step`: the step before the event."""

    def flush(self) -> None:
        """Makes written data visible to readers."""

    def close(self, *, ended: bool) -> None:
        """Flushes and closes the sink, which may be opened again. `ended`: True if this rank leaves
        the run; otherwise training waits for this call and then continues."""


@dataclass(frozen=True)
class Standing:
    """Values of a session whose changes are written as events."""

    generation: int
    world_size: int
    lost_steps: int

    @classmethod
    def of(cls, session: Session) -> Self:
        """Returns a session's current values."""
        return cls(session.generation, session.world_size, session.progress.lost_steps)


class Tracker:
    """Follows one session until the session closes, and writes its progress."""

    def __init__(self, session: Session, sinks: Sequence[Sink], *, every_steps: int) -> None:
        """Raises ConfigurationError for `every_steps` below 1."""
        if every_steps < 1:
            raise ConfigurationError(f"shoal.track(every_steps={every_steps}): expected 1 or more")
        self._session = session
        self._sinks = tuple(sinks)
        self._every = every_steps
        self._open = False
        self._written = 0
        """Newest step that has points, while the sinks are open."""
        self._committed: int | None = None
        """The last step that this rank committed while it was the first rank. Losses reported
        before the next step begins belong to this step."""
        self._due: dict[str, tuple[int, int]] = {}
        """Ordinal and step of each reported number that has to be written, by the number's name."""
        self._counts = {name: each.count for name, each in session.progress.reported.items()}
        self._before = Standing.of(session)
        session.progress.follow(begun=self._begun, committed=self._step_committed)
        session.on_close(lambda: self._close(ended=True))

    def _begun(self) -> None:
        """Assigns losses reported since the last commit to the committed step. Called when a new
        step begins."""
        self._take_reported(self._committed)
        self._write_reported()
        self._committed = None

    def _step_committed(self, step: int) -> None:
        self._take_reported(step)  # losses reported within the step
        now, before = Standing.of(self._session), self._before
        self._before = now
        if not self._session.is_first:
            self._close(ended=False)
            return
        last, self._committed = self._written, step
        due = step // self._every != (step - 1) // self._every
        if not due and now == before:
            return
        if not self._open or step <= last:
            self._reopen(step)
        self._written = step
        rate = self._session.progress.snapshot().samples_per_s
        values = {
            "shoal/samples_per_s_per_rank": rate,
            "shoal/world_size": float(now.world_size),
            "shoal/generation": float(now.generation),
            "shoal/lost_steps": float(now.lost_steps),
        }
        self._each(lambda sink: sink.scalars(step, values))
        happened = "; ".join(_changes(before, now))
        if happened:
            self._each(lambda sink: sink.event(step, happened))
        self._write_reported()
        self._each(lambda sink: sink.flush())

    def _take_reported(self, step: int | None) -> None:
        due = step is not None and step // self._every != (step - 1) // self._every
        for name, reported in self._session.progress.reported.items():
            count, before = reported.count, self._counts.get(name, 0)
            self._counts[name] = count
            if count != before and due and step is not None:
                self._due[name] = (count, step)

    def _write_reported(self) -> None:
        """Writes the reported numbers that are due and known. A number on a device may take a while
        to arrive."""
        if not self._due or not self._open:
            return
        values: dict[str, float] = {}
        for name, (ordinal, step) in [*self._due.items()]:
            known, value = self._session.progress.reported[name].newest
            if known < ordinal:
                continue
            del self._due[name]
            if known == ordinal and step == self._written:
                values["shoal/loss" if name == "loss" else name] = value
        if values:
            self._each(lambda sink: sink.scalars(self._written, values))

    def _reopen(self, step: int) -> None:
        self._close(ended=False)
        self._open = True
        run = TrackedRun.of(self._session)
        self._each(lambda sink: sink.open(run=run, step=step))

    def _close(self, *, ended: bool) -> None:
        if not self._open:
            return
        self._take_reported(self._committed)
        self._write_reported()
        self._open, self._due = False, {}
        self._each(lambda sink: sink.close(ended=ended))

    def _each(self, call: Callable[[Sink], None]) -> None:
        """Calls every sink. If one fails, training continues and the sink is abandoned on this
        rank."""
        for sink in self._sinks:
            try:
                call(sink)
            except Exception as error:
                _log.error(
                    "%s could not be written to and was dropped: %s: %s",
                    type(sink).__name__,
                    type(error).__name__,
                    error,
                )
                self._sinks = tuple(other for other in self._sinks if other is not sink)


def _changes(before: Standing, now: Standing) -> list[str]:
    texts = []
    if now.lost_steps > before.lost_steps:
        texts.append(
            f"a fault aborted {now.lost_steps - before.lost_steps} step(s), which were repeated"
        )
    if now.generation != before.generation:
        texts.append(
            f"generation {now.generation}: {now.world_size} ranks, previously {before.world_size}"
        )
    return texts
