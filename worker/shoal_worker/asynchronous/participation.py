"""Whether others wait for this worker: with ssp and bsp they do for each that takes part, and not
for one that rests.

A worker takes part while it has a batch. When it has none is the engine's to notice; the servers
keep the clocks that others wait by. With asp nobody waits, and nothing of this says a word to a
server. All of it belongs to the training thread.
"""

from __future__ import annotations

from shoal_worker.asynchronous.servers import ParameterServers


class Participation:
    """It begins resting."""

    def __init__(self, servers: ParameterServers, *, waited_for: bool) -> None:
        """`waited_for`: ssp and bsp."""
        self._servers = servers
        self._waited_for = waited_for
        self._rests = True
        """Nobody waits for this worker: it has no batch. It enters when it gets one."""
        self._rests_after_push = False
        """Its loop is left, with a batch at hand."""

    @property
    def rests(self) -> bool:
        """Nobody waits for this worker."""
        return self._rests

    def rest(self) -> None:
        """Says that nobody need wait for this worker; again as often as there is reason to: a
        server may have been started anew, without its data."""
        if self._waited_for:
            self._servers.rest()
            self._rests = True

    def rest_after_push(self, at_hand: bool) -> None:
        """`at_hand`: the next push is this worker's last one for now, of the batch that it has;
        after it, it rests."""
        self._rests_after_push = at_hand

    def pushed(self) -> None:
        """An iteration is over."""
        if self._rests_after_push:
            self._rests_after_push = False
            self.rest()

    def enter(self, clock: int) -> None:
        """Takes part, having finished `clock` iterations, from the iteration on that others are
        about to begin."""
        if self._rests and self._waited_for:
            self._servers.enter(clock)
            self._rests = False
