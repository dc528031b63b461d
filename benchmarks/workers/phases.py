"""Records when a worker's groups are aborted, become idle, and connect, for the parts of a
recovery. `steplog` records steps.

One file per process, one line per moment: CLOCK_MONOTONIC in nanoseconds, and the moment's name.
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
    """A line of a worker's file."""

    time_ns: int
    name: str


def note_into(directory: Path) -> None:
    """Makes this process write its file from now on. Call it before the first group is created."""
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
    """Returns the moments in a worker's file, oldest first."""
    words = (line.split() for line in file.read_text().splitlines())
    return [Moment(time_ns=int(at), name=name) for at, name in words]


def parts_of(moments: list[Moment], *, killed_ns: int, committed_ns: int) -> dict[str, float]:
    """Returns the seconds of each of `PARTS` between a peer's death and this worker's next
    committed step.

    notice: until the group is ended here. abort: until nothing of it uses the device. agree: until
    connecting begins. connect: until the last group is connected, with attempts that failed. redo:
    until the step is committed. A moment that is missing takes the place of the next one, so the
    parts add up to the pause.
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
