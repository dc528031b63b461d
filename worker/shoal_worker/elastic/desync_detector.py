"""Notices that ranks wait for each other because their scripts went different ways, long before a collective's timeout.

Of two ranks of which one evaluates and the other takes a step, each waits in a collective that the other does not issue. That looks like a
slow peer, so nothing is asked while nobody waits. Who has waited for a second writes down in the group's store where it stands and what it
is in, and reads what the first that waited there has written. Where that is something else, no rank will ever come: the group ends with
RANKS_DIVERGED, which says who is in what. Of ranks that are in the same step, what they have issued in their passes is compared, as far as
both have come. It costs nothing in a step, and one small message to the store for each wait of more than a second.

Runs on a thread of its own, and reads what the training thread is in; that stands still while it waits.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from shoal_common.errors import PreconditionError, ShoalError

from shoal_worker.elastic.divergence import waits_apart
from shoal_worker.elastic.waiting import Wait, Where

if TYPE_CHECKING:
    from shoal_worker.elastic.group import Group
    from shoal_worker.elastic.session import Session

_LOOK_S: Final = 0.25
_PATIENCE_S: Final = 1.0
"""Who has waited for so long looks whether it waits in vain."""


class DesyncDetector:
    """Looks after the waits of one session that has peers."""

    def __init__(self, session: Session) -> None:
        session.on_waiting(self._where)
        self._session = session
        self._over = threading.Event()
        self._told: Wait | None = None
        self._thread = threading.Thread(target=self._watch, name="shoal-desync-detector", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Looks once. `now`: time.monotonic()."""
        group = self._session.group
        wait = group.waiting.now if group is not None and group.broken is None else None
        if group is None or wait is None or wait == self._told or now - wait.since <= _PATIENCE_S:
            return
        self._told = wait
        with contextlib.suppress(ShoalError, RuntimeError):  # the store is away, or the group is over: the waiting goes on
            self._compare(group, wait)

    def _where(self) -> Where | None:
        """See `Waiting.where`. On the training thread."""
        session = self._session
        operations, step = session.operations, session.step
        at = session.steps, operations.position
        if operations.running is not None:
            return Where(at, operations.running)
        return Where(at, None, step.source) if step is not None else None

    def _compare(self, group: Group, wait: Wait) -> None:
        in_step = wait.where.operation is None
        issued = self._session.engine.issued().decode() if in_step else ""
        mine: dict[str, Any] = {"rank": group.rank, "what": wait.where.what, "issued": issued}
        first: dict[str, Any] = json.loads(group.waiting.note(wait.where.at, json.dumps(mine)))
        error: str | None = None
        if first["what"] != mine["what"]:
            error = str(waits_apart(first, mine))
        elif in_step:
            try:
                self._session.engine.compare_issued([first["issued"].encode(), mine["issued"].encode()])
            except PreconditionError as apart:
                error = str(apart)
        if error is not None and group.waiting.now is wait:
            group.waiting.condemn(error)
            group.abort(error)
