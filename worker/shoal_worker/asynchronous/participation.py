"""Participation of this worker. With ssp and bsp, workers wait for every worker that participates,
but not for one that rests.

A worker participates while it has a batch; the engine tracks its batches. The servers keep the
clocks that determine which workers wait. With asp no worker waits, so this module does not call the
servers. May be used only on the training thread.
"""

from __future__ import annotations

from shoal_worker.parameter_servers.servers import ParameterServers


class Participation:
    """Tracks whether this worker participates. It rests until its first batch."""

    def __init__(self, servers: ParameterServers, *, waited_for: bool) -> None:
        """`waited_for`: True if other workers wait for this one (ssp and bsp)."""
        self._servers = servers
        self._waited_for = waited_for
        self._rests = True
        """True if the worker rests; no other worker then waits for it. Its next batch makes it
        participate."""
        self._rests_after_push = False
        """True if the script left the loop while a batch was in progress. The worker then rests
        after its next push."""

    @property
    def rests(self) -> bool:
        """True if no other worker waits for this one."""
        return self._rests

    def rest(self) -> None:
        """Reports to the servers that no worker needs to wait for this one. Every call sends the
        report again, because a server may have restarted without its data."""
        if self._waited_for:
            self._servers.rest()
            self._rests = True

    def rest_after_push(self, at_hand: bool) -> None:
        """Sets whether the worker rests after its next push. `at_hand`: True if it has a batch in
        progress, which it still pushes; if False, the caller must call `rest` instead."""
        self._rests_after_push = at_hand

    def pushed(self) -> None:
        """Records the end of an iteration, and makes the worker rest if `rest_after_push` has
        requested this."""
        if self._rests_after_push:
            self._rests_after_push = False
            self.rest()

    def enter(self, clock: int) -> None:
        """Makes the worker participate, starting with the iteration that other workers are about to
        begin. `clock`: number of iterations that this worker has finished."""
        if self._rests and self._waited_for:
            self._servers.enter(clock)
            self._rests = False
