"""Participation of this worker: with ssp and bsp others wait for each worker that takes part, and
not for one that rests.

A worker takes part while it has a batch, which the engine tracks; the servers keep the clocks by
which others wait. With asp nobody waits, and this module sends nothing to a server. Owned by the
training thread.
"""

from __future__ import annotations

from shoal_worker.parameter_servers.servers import ParameterServers


class Participation:
    """Tracks whether this worker takes part; it starts at rest."""

    def __init__(self, servers: ParameterServers, *, waited_for: bool) -> None:
        """Creates the state of a resting worker. `waited_for`: whether others wait for it (ssp and
        bsp)."""
        self._servers = servers
        self._waited_for = waited_for
        self._rests = True
        """True if the worker rests, so that nobody waits for it. It enters when it gets a batch."""
        self._rests_after_push = False
        """True if the loop was left with a batch in progress."""

    @property
    def rests(self) -> bool:
        """True if nobody waits for this worker."""
        return self._rests

    def rest(self) -> None:
        """Tells the servers that nobody needs to wait for this worker. Repeated whenever useful,
        since a server may have restarted without its data."""
        if self._waited_for:
            self._servers.rest()
            self._rests = True

    def rest_after_push(self, at_hand: bool) -> None:
        """With `at_hand`, rests after the next push, which is the last for now."""
        self._rests_after_push = at_hand

    def pushed(self) -> None:
        """Records the end of an iteration."""
        if self._rests_after_push:
            self._rests_after_push = False
            self.rest()

    def enter(self, clock: int) -> None:
        """Takes part, having finished `clock` iterations, from the iteration on that others are
        about to begin."""
        if self._rests and self._waited_for:
            self._servers.enter(clock)
            self._rests = False
