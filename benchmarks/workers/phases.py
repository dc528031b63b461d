"""Records the times at which a worker's groups are aborted, become idle and connect, so that a
recovery can be divided into its parts. (`steplog` records the steps.)

Each process writes a file with one line per event: the time by CLOCK_MONOTONIC in nanoseconds, and
the name of the event.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ENDED: Final = "ended"
RESTED: Final = "rested"
CONNECTING: Final = "connecting"
CONNECTED: Final = "connected"
PARTS: Final = ("notice", "abort", "agree", "connect", "redo")


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One event: a line of a worker's file."""

    time_ns: int
    name: str


def note_into(directory: Path) -> None:
    """Makes this process record its events in a file in `directory`. Must be called before the
    first group is created."""
    from shoal_worker.backends.base import (
        CommunicationBackend,
    )  # imports torch; the harness does not
    from shoal_worker.backends.nccl.backend import NCCLBackend

    file = os.open(directory / f"{os.getpid()}.phases", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(name: str) -> None:
        os.write(file, b"%d %s\n" % (time.monotonic_ns(), name.encode()))

    _wrap(CommunicationBackend, "abort", before=lambda: note(ENDED))
    _wrap(CommunicationBackend, "shutdown", after=lambda: note(RESTED))
    _wrap(
        CommunicationBackend,
        "initialize",
        before=lambda: note(CONNECTING),
        after=lambda: note(CONNECTED),
    )
    for owner in (CommunicationBackend, NCCLBackend):
        _wrap(owner, "rest", after=lambda: note(RESTED))


def read(file: Path) -> list[Moment]:
    """Returns the events in a worker's file, oldest first."""
    words = (line.split() for line in file.read_text().splitlines())
    return [Moment(time_ns=int(at), name=name) for at, name in words]


def parts_of(moments: list[Moment], *, killed_ns: int, committed_ns: int) -> dict[str, float]:
    """Divides the time from a peer's death to this worker's next committed step into `PARTS`.
    Returns the duration of each part in seconds:

    - notice: until this worker begins to abort the old group.
    - abort: until the old group no longer uses the device.
    - agree: until this worker begins to connect a new group.
    - connect: until the last new group is connected, including failed attempts.
    - redo: until the step is committed.

    If an event is missing, its part ends at the next event, so the parts always add up to the
    entire pause.
    """
    since = [moment for moment in moments if killed_ns <= moment.time_ns <= committed_ns]

    def first(name: str, after: int) -> int | None:
        return next(
            (moment.time_ns for moment in since if moment.name == name and moment.time_ns >= after),
            None,
        )

    connected = max(
        (moment.time_ns for moment in since if moment.name == CONNECTED), default=committed_ns
    )
    ended = first(ENDED, killed_ns) or first(CONNECTING, killed_ns) or connected
    connecting = first(CONNECTING, ended) or connected
    rested = min(first(RESTED, ended) or connecting, connecting)
    borders = (killed_ns, ended, rested, connecting, connected, committed_ns)
    return {
        part: (end - begin) / 1e9
        for part, begin, end in zip(PARTS, borders, borders[1:], strict=False)
    }


def _wrap(
    owner: Any,
    name: str,
    *,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> None:
    wrapped = owner.__dict__.get(name)
    if wrapped is None:
        return

    @functools.wraps(wrapped)
    def noting(*arguments: Any, **options: Any) -> Any:
        if before is not None:
            before()
        answer = wrapped(*arguments, **options)
        if after is not None:
            after()
        return answer

    setattr(owner, name, noting)
