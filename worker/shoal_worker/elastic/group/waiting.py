"""Current wait of a group's training thread, and the notes that ranks exchange about it outside of
their collectives.

At one position of the run, after a step or an operation, all ranks whose scripts agree wait in the
same thing: the next step, or the next operation. Only an operation in the middle of a step, after
collectives of that step, differs from other waits at its position; it is therefore not compared.
"""

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
"""Committed steps of the run, and operations between steps since the last one."""

_VERDICT: Final = "verdict"
_NONE: Final = "-"


class Where(NamedTuple):
    """Position of a script that waits for its peers, with the kind of its wait."""

    at: At
    operation: str | None
    """Kind of the operation that it is in; None: a step."""
    source: StepSource | None = None
    """Loader of the step; None: a loop without a Shoal loader."""

    @property
    def what(self) -> str:
        """Description such as "evaluate", or "a step of loader 'loader'"."""
        if self.operation is not None:
            return self.operation
        return f"a step of loader {self.source.name!r}" if self.source is not None else "a step"


class Wait(NamedTuple):
    """A wait in progress."""

    since: float
    """Start, by time.monotonic()."""
    where: Where


class Waiting:
    """Waits of the training thread in one group and its parts. That thread enters and leaves it
    around each wait; another may read it."""

    def __init__(self, store: RedisStore | None) -> None:
        """`store`: the group's, whose prefix contains the notes; None: this group has none, and
        nothing is compared."""
        self.now: Wait | None = None
        """Current wait, if it can be compared with others'."""
        self.where: Callable[[], Where | None] = lambda: None
        """Returns the script's position; None at a step boundary, where nothing is compared."""
        self._stepped_at: At | None = None
        """Last position at which the script was in a step's collectives."""
        self._notes = store.with_prefix(f"{store.prefix}:notes") if store is not None else None
        self._verdict: str | None = None

    def __enter__(self) -> None:
        where = self.where()
        if where is None or (where.operation is not None and where.at == self._stepped_at):
            return
        if where.operation is None:
            self._stepped_at = where.at
        self.now = Wait(time.monotonic(), where)

    def __exit__(self, *_: object) -> None:
        self.now = None

    def note(self, at: At, text: str, among: str = "") -> str:
        """Writes `text` for a position unless a rank has already written one. `among`: names the
        ranks that compare it; empty: all. Returns the stored text. Raises StoreError,
        ShoalError."""
        if self._notes is None:
            return text
        return self._notes.compare_set(f"{at[0]}/{at[1]}/{among}", "", text).decode()

    def condemn(self, verdict: str) -> None:
        """Ends the group with this error on all ranks that learn of it."""
        self._verdict = verdict
        if self._notes is not None:
            with contextlib.suppress(ShoalError, RuntimeError):
                # the store is away: this rank has its error all the same
                self._notes.set(_VERDICT, verdict)

    @property
    def verdict(self) -> str | None:
        """Error with which a rank ended the group; None if it ended otherwise. Asks the store
        once."""
        if self._verdict is None and self._notes is not None:
            notes, self._notes = self._notes, None
            with contextlib.suppress(ShoalError, RuntimeError):
                found = notes.compare_set(_VERDICT, _NONE, _NONE).decode()
                self._verdict = found if found != _NONE else None
        return self._verdict


# --------------------------------------------------------------------------------- lines in the log
#
# A line in the log every ten seconds while a thread waits: for what, for how long, and why it is
# not there.

_log = logging.getLogger(__name__)

EVERY_S: Final = 10.0


class WaitingLines:
    """Log lines of one wait; belongs to the waiting thread."""

    def __init__(self, *, waited_s: float = 0.0, first_in_s: float | None = None) -> None:
        """The wait began `waited_s` ago; the first line is due in `first_in_s` (None: like the
        others)."""
        now = time.monotonic()
        self._started = now - waited_s
        self._said = now - EVERY_S + (EVERY_S if first_in_s is None else first_in_s)

    def say(self, what: str, why: Callable[[], str]) -> None:
        """Logs the wait if a line is due. Called repeatedly. `why`: called only when a line is
        due."""
        now = time.monotonic()
        if now >= self._said + EVERY_S:
            self._said = now
            _log.warning("waiting for %s for %.0f s: %s", what, now - self._started, why())
