"""Tracks whether this worker participates or rests. Under ssp and bsp, workers wait for every
worker that participates, but not for workers that rest.

A worker participates while it has a batch; the engine tracks its batches. The servers keep the
clocks that determine which workers wait. Under asp, no worker waits, so this module does not call
the servers. May be used only on the training thread.
"""

from __future__ import annotations

from shoal_worker.parameter_servers.servers import ParameterServers


class Participation:
    """This worker's participation. The worker rests until its first batch."""

    def __init__(self, servers: ParameterServers, *, waited_for: bool) -> None:
        """`waited_for`: True if other workers may have to wait for this one (ssp and bsp)."""
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
        """True if the worker rests, so that no other worker waits for it."""
        return self._rests

    def rest(self) -> None:
        """Reports to the servers that no worker needs to wait for this one. Every call sends the
        report again, because a server may have restarted without its data."""
        if self._waited_for:
            self._servers.rest()
            self._rests = True

    def rest_after_push(self, at_hand: bool) -> None:
        """Makes the worker rest after its next push if `at_hand` is True, because it has a batch in
        progress that it still pushes. If `at_hand` is False, there is no such push, and the caller
        must call `rest` instead."""
        self._rests_after_push = at_hand

    def pushed(self) -> None:
        """Records the end of an iteration, and makes the worker rest if `rest_after_push` has
        requested this."""
        if self._rests_after_push:
            self._rests_after_push = False
            self.rest()

    def enter(self, clock: int) -> None:
        """Makes the worker participate. Its first iteration is the one that other workers are about
        to begin. `clock`: number of iterations that this worker has finished."""
        if self._rests and self._waited_for:
            self._servers.enter(clock)
            self._rests = False
