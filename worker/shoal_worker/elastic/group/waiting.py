"""Records what the training thread is waiting for in a group, and exchanges notes about waits with
other ranks through the store.

At a given position of the run, after a step or an operation, all ranks whose scripts agree wait for
the same thing: the next step, or the next operation. There is one exception: an operation in the
middle of a step may follow collectives of that step. Such an operation is therefore not compared
with other ranks."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from shoal_common.errors import ShoalError

from shoal_worker.elastic.contract.loader_interface import StepSource
from shoal_worker.store.redis_store import RedisStore

# ------------------------------------------------------------------------------- what is waited for

At = tuple[int, int]
"""Position where scripts may wait: number of committed steps of the run, and number of operations
since the last step."""

_VERDICT: Final = "verdict"
_NONE: Final = "-"


class Where(NamedTuple):
    """Position of a script that is waiting for its peers, and what it is waiting for."""

    at: At
    operation: str | None
    """Kind of the script's current operation; None: the script is in a step."""
    source: StepSource | None = None
    """Loader of the step; None: a loop without a Shoal loader."""

    @property
    def what(self) -> str:
        """Description of the step or operation where the script is waiting, such as "evaluate" or
        "a step of loader 'loader'"."""
        if self.operation is not None:
            return self.operation
        return f"a step of loader {self.source.name!r}" if self.source is not None else "a step"


class Wait(NamedTuple):
    """Wait in progress, with its start and the script's position."""

    since: float
    """Start of the wait (time.monotonic())."""
    where: Where


class Waiting:
    """Context manager that the training thread enters around each wait in a group and its parts.
    Another thread may read `now`, the current wait."""

    def __init__(self, store: RedisStore | None) -> None:
        """`store`: the group's store, which contains the ranks' notes about their waits. None: the
        group has no store, so waits are not compared."""
        self.now: Wait | None = None
        """Current wait, if it can be compared with other ranks' waits; otherwise None."""
        self.where: Callable[[], Where | None] | None = None
        """Function that returns the script's position, or None at a step boundary, where waits are
        not compared. If the attribute itself is None, no wait is compared."""
        self._stepped_at: At | None = None
        """Last position where the script waited in a step's collectives."""
        self._notes = store.with_prefix(f"{store.prefix}:notes") if store is not None else None
        self._verdict: str | None = None

    def __enter__(self) -> None:
        where = self.where() if self.where is not None else None
        if where is None or (where.operation is not None and where.at == self._stepped_at):
            return
        if where.operation is None:
            self._stepped_at = where.at
        self.now = Wait(time.monotonic(), where)

    def __exit__(self, *_: object) -> None:
        self.now = None

    def note(self, at: At, text: str, among: str = "") -> str:
        """Publishes `text` as this rank's note for a position, and returns it. If another rank has
        already published a note for that position, returns that note instead. `among`: name of the
        set of ranks that compare their notes; empty: all ranks. Raises StoreError, ShoalError."""
        if self._notes is None:
            return text
        return self._notes.compare_set(f"{at[0]}/{at[1]}/{among}", "", text).decode()

    def condemn(self, verdict: str) -> None:
        """Stores the error message `verdict`. After the group has been aborted, the ranks read the
        message and raise it as an error."""
        self._verdict = verdict
        if self._notes is not None:
            with contextlib.suppress(ShoalError, RuntimeError):
                # the store is unavailable; this rank raises its error nevertheless
                self._notes.set(_VERDICT, verdict)

    @property
    def verdict(self) -> str | None:
        """Error message stored by the rank that aborted the group because scripts have diverged;
        None if there is none. Queries the store only once."""
        if self._verdict is None and self._notes is not None:
            notes, self._notes = self._notes, None
            with contextlib.suppress(ShoalError, RuntimeError):
                found = notes.compare_set(_VERDICT, _NONE, _NONE).decode()
                self._verdict = found if found != _NONE else None
        return self._verdict


# --------------------------------------------------------------------------------- lines in the log

_log = logging.getLogger(__name__)

EVERY_S: Final = 10.0


class WaitingLines:
    """Log lines about one wait: what the thread is waiting for, how long, and why. At most one line
    per ten seconds. Used only by the waiting thread."""

    def __init__(self, *, waited_s: float = 0.0, first_in_s: float | None = None) -> None:
        """`waited_s`: how long ago the wait began, in seconds. `first_in_s`: seconds until the
        first line; None: the interval between later lines."""
        now = time.monotonic()
        self._started = now - waited_s
        self._said = now - EVERY_S + (EVERY_S if first_in_s is None else first_in_s)

    def say(self, what: str, why: Callable[[], str]) -> None:
        """Logs the wait if a line is due. Called repeatedly during the wait. `why`: returns the
        reason for the wait; called only if a line is due."""
        now = time.monotonic()
        if now >= self._said + EVERY_S:
            self._said = now
            _log.warning("waiting for %s for %.0f s: %s", what, now - self._started, why())
