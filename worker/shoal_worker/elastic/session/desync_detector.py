"""Detects ranks that are waiting for each other because their scripts have diverged, long before
their collectives time out.

If one rank evaluates while another takes a step, each waits in a collective that the other does not
issue. This looks like waiting for a slow peer, so the detector checks a wait only after one second.
The rank then writes a note with its position and its collective to the group's store, and reads the
note of the first rank that waited at that position. If the collectives differ, the wait can never
end, so the rank aborts the group with RANKS_DIVERGED and a list of the ranks' collectives. If two
ranks are in the same step, the detector compares the lists of collectives that they have issued in
it, as far as both lists reach (`CollectiveTrace`). In a normal step, only the trace is recorded. A
wait of more than a second causes one or two small messages to the store.

Runs on a separate thread and reads the training thread's position, which does not change during a
wait."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from shoal_common.errors import PreconditionError, ShoalError

from shoal_worker.elastic.contract.step import CollectiveTrace, apart
from shoal_worker.elastic.group.divergence import traces_apart, waits_apart
from shoal_worker.elastic.group.waiting import Wait, Where

if TYPE_CHECKING:
    from shoal_worker.elastic.group.group import Group
    from shoal_worker.elastic.session.session import Session

_LOOK_S: Final = 0.25
_PATIENCE_S: Final = 1.0
"""Minimum duration of a wait that is checked, in seconds."""


class DesyncDetector:
    """Thread that compares this rank's waits for peers with the waits of other ranks."""

    def __init__(self, session: Session) -> None:
        session.on_waiting(self._where)
        self._session = session
        self._over = threading.Event()
        self._reported: Wait | None = None
        self._thread = threading.Thread(
            target=self._watch, name="shoal-desync-detector", daemon=True
        )

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stops the thread."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Checks the training thread's current wait once, if it is waiting. `now`: value of
        time.monotonic()."""
        group = self._session.group
        wait = group.waiting.now if group is not None and group.broken is None else None
        if (
            group is None
            or wait is None
            or wait == self._reported
            or now - wait.since <= _PATIENCE_S
        ):
            return
        self._reported = wait
        with contextlib.suppress(ShoalError, RuntimeError):
            # if the store is unavailable, or the group has ended, the wait continues
            self._compare(group, wait)

    def _where(self) -> Where | None:
        """Returns the script's current position, for `Waiting.where`. Called on the training
        thread."""
        session = self._session
        operations, step = session.operations, session.step
        at = session.steps, operations.position
        if operations.running is not None:
            return Where(at, operations.running)
        return Where(at, None, step.source) if step is not None else None

    def _compare(self, group: Group, wait: Wait) -> None:
        mine: dict[str, Any] = {"rank": group.rank, "what": wait.where.what}
        try:
            if wait.where.operation is None:
                self._compare_in_step(group, wait, mine)
            else:
                self._exchange(group, wait, mine)
        except PreconditionError as apart:
            if group.waiting.now is wait:
                group.waiting.condemn(str(apart))
                group.abort(str(apart))

    @staticmethod
    def _exchange(group: Group, wait: Wait, mine: dict[str, Any]) -> dict[str, Any]:
        """Writes this rank's note about its wait, and returns the note of the first rank that
        waited at the same position. Raises PreconditionError if that rank is waiting in a different
        collective."""
        first: dict[str, Any] = json.loads(group.waiting.note(wait.where.at, json.dumps(mine)))
        if first["what"] != mine["what"]:
            raise waits_apart(first, mine)
        return first

    def _compare_in_step(self, group: Group, wait: Wait, mine: dict[str, Any]) -> None:
        """Compares this rank's collectives in the current step with the collectives of another
        rank. Raises PreconditionError if they differ."""
        engine, step = self._session.engine, self._session.step
        trace, passes_with = (
            step.trace if step is not None else CollectiveTrace(),
            engine.passes_with,
        )
        mine |= {"issued": engine.issued().decode(), "course": trace.encode(passes=not passes_with)}
        own = {"rank": group.rank, "course": trace.encode(passes=True)}
        if group.waiting.now is not wait:
            # the training thread has continued, perhaps to the next step, and the trace of that
            # step must not be written for this position
            return
        first = self._exchange(group, wait, mine)
        engine.compare_issued([first["issued"].encode(), mine["issued"].encode()])
        self._compare_traces(first, mine, wait)
        if passes_with:
            self._compare_traces(
                json.loads(group.waiting.note(wait.where.at, json.dumps(own), passes_with)),
                own,
                wait,
            )

    @staticmethod
    def _compare_traces(first: dict[str, Any], mine: dict[str, Any], wait: Wait) -> None:
        what = apart(first["course"], mine["course"])
        if what is not None:
            raise traces_apart(first, mine, what, wait.where.at[0] + 1)
