"""Reports a run's progress to sinks: each step once, from one rank at a time.

Every rank follows the run, and the first rank writes. When the ranks change, a different rank may
become the first: it opens the sinks and continues with the next step, and the previous first rank
closes its own sinks. When steps are repeated (after a resume, or a return to a checkpoint), the
sinks are reopened at the first of these steps. A sink with `on_every_rank` is open on all ranks
instead.

The training thread only decides what to write; `delivery.py` writes it on other threads. If the
writing rank is killed, the reports in its queue are lost. The other ranks therefore keep their
newest reports, and the next rank to write begins with these; the sink ensures that no step appears
twice.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from shoal_common.errors import ConfigurationError

from shoal_worker.elastic.session.session import Session
from shoal_worker.tracking.delivery import Delivery
from shoal_worker.tracking.log_lines import LogLines
from shoal_worker.tracking.sinks import Event, EventKind, Points, Report, Sink, TrackedRun
from shoal_worker.tracking.spans import SpanSource

_END_S: Final = 30.0
"""Maximum time, in seconds, to wait at the end of a run for the trackers to receive all reports."""
_LOOK_S: Final = 0.2
"""Interval, in seconds, between two checks whether the session has ended. The thread that waits for
the end of the script makes these checks."""
_MOST_KEPT: Final = 1_000
"""Maximum number of reports that a rank keeps while a different rank writes."""


@dataclass(frozen=True)
class SessionValues:
    """Values of a session that are compared between steps to detect events."""

    generation: int
    world_size: int
    lost_steps: int
    newcomers: int = 0
    """Number of ranks whose process did not have a rank in the previous generation."""

    @classmethod
    def of(cls, session: Session) -> Self:
        """Returns a session's current values."""
        return cls(
            session.generation,
            session.world_size,
            session.progress.lost_steps,
            session.newcomers,
        )


def track(session: Session, sinks: Sequence[Sink], *, every_steps: int) -> None:
    """Follows a session until it closes, and writes its progress to `sinks`.

    Raises ConfigurationError for `every_steps` below 1.
    """
    if every_steps < 1:
        raise ConfigurationError(f"shoal.track(every_steps={every_steps}): expected 1 or more")
    for everywhere in (False, True):
        chosen = [Delivery(sink) for sink in sinks if sink.on_every_rank is everywhere]
        if chosen:
            Tracker(session, chosen, every_steps=every_steps, everywhere=everywhere)


class Tracker:
    """Follows one session, and queues its progress for sinks. All methods return immediately."""

    def __init__(
        self,
        session: Session,
        deliveries: Sequence[Delivery],
        *,
        every_steps: int,
        everywhere: bool,
    ) -> None:
        """`everywhere`: True to write on every rank; False: on the first rank only."""
        self._session = session
        self._deliveries = deliveries
        self._every = every_steps
        self._everywhere = everywhere
        self._open = False
        self._kept: deque[Report] = deque(maxlen=_MOST_KEPT)
        """This rank's newest reports while its sinks are closed."""
        self._reported = 0
        """Newest step that has points."""
        self._followed_from: int | None = None
        """Step before the first one that this rank has committed."""
        self._steps: dict[str, int] = {}
        """Name -> step of its newest report."""
        self._written: dict[str, int] = {}
        """Name -> step of its newest report that has been written."""
        self._committed: int | None = None
        """Last step that this rank has committed. A loss reported before the next step begins
        belongs to this step."""
        self._due: dict[str, tuple[int, int]] = {}
        """Reported numbers that must be written: name -> ordinal of the report, and its step."""
        self._counts = {name: each.count for name, each in session.progress.reported.items()}
        self._before = SessionValues.of(session)
        self._ended = threading.Event()
        """Set when this rank leaves the run, or its process ends."""
        # runs after callbacks that are registered later, such as the callback that waits for a
        # checkpoint
        session.on_close(self._end)
        if not everywhere:
            threading.Thread(target=self._end_with_script, name="shoal-tracker").start()
        session.progress.follow(begun=self._begun, committed=self._step_committed)
        if everywhere:
            SpanSource(session, self._put, every_steps=every_steps)
            LogLines(session, self._put)

    def _begun(self) -> None:
        """Assigns the losses that the script has reported since the last commit to the last
        committed step. Must be called when a new step begins."""
        self._finish_step()
        self._committed = None

    def _finish_step(self, *, last: bool = False) -> None:
        self._take_reported(self._committed, last=last)
        self._write_reported()

    def _end(self) -> None:
        """Waits until the trackers have received all reports. Later calls do nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._finish_step(last=True)
        give_up_at = time.monotonic() + _END_S
        for delivery in self._deliveries:
            delivery.end()
        for delivery in self._deliveries:
            delivery.wait(give_up_at)

    def _end_with_script(self) -> None:
        """Ends tracking as soon as the main thread has ended, before exit hooks run. The session
        itself ends in an exit hook. W&B's exit hook would run before that one, and stop W&B's own
        process."""
        main = threading.main_thread()
        while main.is_alive():
            if self._ended.is_set():
                return
            main.join(_LOOK_S)
        self._end()

    def _step_committed(self, step: int) -> None:
        self._write_reported()  # numbers of the previous step that were on a device
        now, before = SessionValues.of(self._session), self._before
        self._before = now
        last, self._committed = self._reported, step
        repeats = step <= last
        if self._followed_from is None:
            self._followed_from = step - 1
        if repeats:
            self._steps = {name: min(each, step - 1) for name, each in self._steps.items()}
            self._written.clear()
        self._take_reported(step)  # losses that were reported within the step
        writes = self._everywhere or self._session.is_first
        if not writes:
            self._close()
        if repeats:
            kept = [report for report in self._kept if report.step < step]
            self._kept = deque(kept, maxlen=_MOST_KEPT)
        if writes and (repeats or not self._open):
            self._reopen(step)
        if not self._is_due(step) and now == before and not repeats:
            self._write_reported()
            return
        time_ns = time.time_ns()
        events = [
            Event(step=step, time_ns=time_ns, kind=kind, text=text)
            for kind, text in changes(before, now, step=step, last=last if repeats else None)
        ]
        self._reported = step
        rate = self._session.progress.snapshot().samples_per_s
        values = {
            "shoal/samples_per_s_per_rank": rate,
            "shoal/world_size": float(now.world_size),
            "shoal/generation": float(now.generation),
            "shoal/lost_steps": float(now.lost_steps),
        }
        self._put(Points(step=step, time_ns=time_ns, values=values))
        for event in events:
            self._put(event)
        self._write_reported()

    def _is_due(self, step: int) -> bool:
        return step // self._every != (step - 1) // self._every

    def _take_reported(self, step: int | None, *, last: bool = False) -> None:
        """Notes which numbers reported for `step` must be written: of each name, the first of
        `every_steps` steps, and at the end of the run (`last`) the last one. A name that the script
        reports once per epoch is therefore always written."""
        for name, reported in self._session.progress.reported.items():
            count, before = reported.count, self._counts.get(name, 0)
            self._counts[name] = count
            if step is None:
                continue
            is_new = count != before
            previous = self._steps.get(name, self._followed_from or 0)
            if is_new:
                self._steps[name] = step
                if self._is_due(step) or step // self._every > previous // self._every:
                    self._due[name] = (count, step)
            newest = self._steps.get(name, 0)
            if last and newest >= self._reported and newest not in (0, self._written.get(name)):
                self._due[name] = (count, newest)

    def _write_reported(self) -> None:
        """Writes the numbers that the script has reported and that are due, as far as their values
        are known. The value of a number on a device may become known only later."""
        points: dict[int, dict[str, float]] = {}
        for name, (ordinal, step) in [*self._due.items()]:
            known, value = self._session.progress.reported[name].newest
            if known < ordinal:
                continue
            del self._due[name]
            if known == ordinal and step >= self._reported:
                points.setdefault(step, {})["shoal/loss" if name == "loss" else name] = value
                self._written[name] = step
        for step, values in sorted(points.items()):
            self._reported = step
            self._put(Points(step=step, time_ns=time.time_ns(), values=values))

    def _reopen(self, step: int) -> None:
        run, kept = TrackedRun.of(self._session), list(self._kept)
        first = min([step, *(report.step for report in kept)])
        self._each(lambda delivery: delivery.open(run=run, step=first, reports=kept))
        self._open = True
        self._kept.clear()

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._each(Delivery.close)

    def _put(self, report: Report) -> None:
        """Queues a report for the sinks. While they are closed because another rank is writing,
        keeps the report instead, in case this rank becomes the writer. May be called from any
        thread."""
        if self._open:
            self._each(lambda delivery: delivery.put(report))
        else:
            self._kept.append(report)

    def _each(self, call: Callable[[Delivery], None]) -> None:
        for delivery in self._deliveries:
            call(delivery)


def changes(
    before: SessionValues, now: SessionValues, *, step: int, last: int | None
) -> list[tuple[EventKind, str]]:
    """Returns the events (kind and text) that happened between two states of a session. `step`: the
    committed step to which `now` belongs. `last`: if steps are repeated, the newest step that was
    committed before; otherwise None."""
    found: list[tuple[EventKind, str]] = []
    if last is not None:
        found.append((EventKind.RETURN, f"steps {step} to {last} are repeated"))
    if now.lost_steps > before.lost_steps:
        lost = now.lost_steps - before.lost_steps
        found.append((EventKind.FAULT, f"a fault aborted {lost} step(s), which were repeated"))
    if now.generation == before.generation:
        return found
    joined = max(now.newcomers, now.world_size - before.world_size) if before.generation else 0
    left = before.world_size + joined - now.world_size if before.generation else 0
    if joined:
        found.append((EventKind.JOIN, f"{joined} rank(s) joined"))
    if left:
        found.append((EventKind.LEAVE, f"{left} rank(s) left"))
    found.append(
        (
            EventKind.GENERATION,
            f"generation {now.generation}: {now.world_size} ranks, previously {before.world_size}",
        )
    )
    return found
