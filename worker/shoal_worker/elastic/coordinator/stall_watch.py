"""Watches the training thread while it waits for its peers, because a waiting collective fails only
after minutes and reports nothing before that.

Once a wait has lasted ten seconds, the watch probes which peers this process cannot reach, reports
them to the coordinator in heartbeats, and logs the wait every ten seconds. If a peer is unreachable
twice in a row, the watch aborts the group, minutes before the collective's own deadline. The
coordinator then keeps the two members in different generations, or declares the peer's machine
lost. The watch also determines which connections are constantly busy.

Gloo and NCCL seldom report which peer failed, and two members with a broken link between them would
form one generation after another. Each member therefore probes its peers itself: here, and after a
collective has timed out or a generation did not form. A hung peer counts as reachable, because its
kernel accepts connections.

Runs on a separate thread, which never blocks longer than a probe takes.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Final

from shoal_common.errors import MembershipChanged, UnavailableError
from shoal_common.formats.rank_table import MOST_SENT_WHOLE
from shoal_common.settings import parse_address

from shoal_worker.backends.base import Traffic
from shoal_worker.backends.waits import Waits
from shoal_worker.elastic.contract.generation import Generation, Peer
from shoal_worker.elastic.coordinator.hang_report import HangReport, neighbour_stacks
from shoal_worker.elastic.coordinator.link import CoordinatorLink
from shoal_worker.elastic.coordinator.progress import BusyLink
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.group.transfer import PROBE
from shoal_worker.elastic.group.waiting import WaitingLines

_LOOK_S: Final = 0.05
GENERATION_OVER_OR_AWAY: Final = (MembershipChanged, UnavailableError)
"""Errors that reading a generation's peers may raise; see `AskedPeers`."""


def unreachable(
    peers: Mapping[int, str], *, timeout: timedelta, given_up: Callable[[], bool]
) -> list[int]:
    """Returns the ranks whose addresses do not accept a connection within `timeout`. Returns an
    empty list once `given_up` returns True. `peers`: each rank's `donor_address` (host:port)."""
    if given_up():
        return []
    deadline = time.monotonic() + timeout.total_seconds()
    left = set(peers)
    with ExitStack() as stack, selectors.DefaultSelector() as waiting:
        for rank, address in peers.items():
            with suppress(OSError):  # the rank stays in `left` and counts as unreachable
                connection = stack.enter_context(_start_connecting(address))
                waiting.register(connection, selectors.EVENT_WRITE, (rank, connection))
        while waiting.get_map() and time.monotonic() < deadline and not given_up():
            for key, _ in waiting.select(_LOOK_S):
                rank, connection = key.data
                waiting.unregister(connection)
                with suppress(OSError):  # not accepted: the rank stays in `left`
                    connection.send(PROBE)  # raises an error if connecting has failed
                    left.discard(rank)
    return [] if given_up() else sorted(left)


def _start_connecting(address: str) -> socket.socket:
    """Starts a non-blocking connection. Raises OSError."""
    parsed = parse_address(address)
    family, kind, protocol, _, endpoint = socket.getaddrinfo(
        parsed.host, parsed.port, type=socket.SOCK_STREAM
    )[0]
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    status = connection.connect_ex(endpoint)
    if status not in (0, errno.EINPROGRESS):
        connection.close()
        raise OSError(status, os.strerror(status))
    return connection


_log = logging.getLogger(__name__)

_TICK_S: Final = 1.0
LOOK_AFTER_S: Final = 10.0
"""Duration of a wait, in seconds, after which the watch probes its peers."""
_LOOK_AGAIN_S: Final = 5.0
_REACH_TIMEOUT: Final = timedelta(seconds=1)
_TRAFFIC_EVERY_S: Final = 5.0
_MOSTLY: Final = 0.5
_MOST_PEERS: Final = 16
"""Maximum world size in which a rank probes all its peers. In larger worlds, it probes only its
neighbors in ring and halving collectives. The number is limited because a peer cannot accept
connections while a call holds Python's global lock. During the call, its kernel must be able to
queue all probes."""


class StallWatch:
    """Watches one member's waits, and probes its peers."""

    def __init__(
        self,
        link: CoordinatorLink,
        waits: Waits,
        group: Callable[[], Group | None],
        hangs: HangReport | None = None,
    ) -> None:
        """`group`: returns the last group that was formed. `hangs`: collects the stacks of this
        process while it makes no progress; None: no stacks are collected."""
        self._link = link
        self._waits = waits
        self._group, self._hangs = group, hangs
        self._closed = threading.Event()
        self._lines: WaitingLines | None = None
        self._looked_at = 0.0
        self._missed: tuple[int, frozenset[int]] = (0, frozenset())
        """Generation of the last probe, and the ranks that were unreachable."""
        self._reached = False
        """True if the last probe reached the member that the coordinator keeps this member
        separated from."""
        self._traffic = BusyLinks()
        self._thread = threading.Thread(target=self._run, name="shoal-watch", daemon=True)

    def start(self) -> None:
        """Starts the watching thread."""
        self._thread.start()

    def close(self) -> None:
        """Stops watching. Does not wait for a probe in progress."""
        self._closed.set()

    @property
    def busy_link(self) -> BusyLink | None:
        """Connection of this rank that has had data waiting to be sent for most of the last few
        seconds; None if there is none."""
        return self._traffic.busiest

    def _run(self) -> None:
        while not self._closed.wait(_TICK_S):
            if self._hangs is not None:
                self._hangs.look()
                self._look_at_neighbours()
            group = self._group()
            if group is None or group.broken is not None:
                self._lines = None
                if self._link.apart_from and time.monotonic() >= self._looked_at + _LOOK_AGAIN_S:
                    self._look_while_kept_out()
                    self._looked_at = time.monotonic()
                continue
            self._traffic.look(group.generation, group.traffic())
            waited_s, what = self._waits.now
            if waited_s < LOOK_AFTER_S:
                if self._lines is not None:
                    self._lines, self._missed = None, (0, frozenset())
                    self._link.cannot_reach(())
                continue
            # The coordinator's message is more informative and arrives soon, unless the coordinator
            # is unavailable.
            self._lines = self._lines or WaitingLines(waited_s=waited_s, first_in_s=2 * _TICK_S)
            if time.monotonic() >= self._looked_at + _LOOK_AGAIN_S:
                self._look(group, waited_s, what)
                self._looked_at = time.monotonic()
            if not self._link.notice:  # the link has logged the notice, which says more
                self._lines.say(f"peers in {what}", self._why)

    def _look_at_neighbours(self) -> None:
        """Reads the stacks of members on this machine, if the coordinator has requested them."""
        if silent := self._link.silent_neighbours():
            found = [neighbour_stacks(member_id, pid) for member_id, pid in silent]
            self._link.observed([each for each in found if each is not None])

    def _why(self) -> str:
        _, missed = self._missed
        if missed:
            return f"unreachable: {named_addresses(self._link.newest_generation, sorted(missed))}"
        return "all peers are reachable, so the slow one is unknown"

    def _names(self, ranks: frozenset[int]) -> str:
        return named_ranks(self._link.newest_generation, sorted(ranks))

    def _look_while_kept_out(self) -> None:
        """Probes whether this member can again reach `apart_from`, the member from which the
        coordinator keeps it separated. Requires two successful probes in a row."""
        generation, other = self._link.newest_generation, self._link.apart_from
        try:
            peers = {
                peer.rank: peer.donor_address
                for peer in (generation.peers if generation else ())
                if peer.member_id == other
            }
        except GENERATION_OVER_OR_AWAY:
            return
        reached = bool(peers) and not unreachable(
            peers, timeout=_REACH_TIMEOUT, given_up=self._closed.is_set
        )
        self._link.reaches(reached and self._reached)
        self._reached = reached

    def _look(self, group: Group, waited_s: float, what: str) -> None:
        generation = group.generation
        try:
            peers = {
                peer.rank: peer.donor_address
                for peer in generation.peers_of(neighbours(generation.rank, generation.world_size))
            }
        except GENERATION_OVER_OR_AWAY:
            return
        given_up = lambda: group.broken is not None or self._closed.is_set()  # noqa: E731
        missed = frozenset(
            unreachable(
                {rank: a for rank, a in peers.items() if a},
                timeout=_REACH_TIMEOUT,
                given_up=given_up,
            )
        )
        number, before = self._missed
        self._missed = (generation.number, missed)
        self._link.cannot_reach(sorted(missed))
        again = missed & before if number == generation.number else frozenset()
        if again and self._waits.now[0] >= waited_s:
            _log.warning(
                "abandoned generation %d after waiting %.0f s for %s: could not reach %s",
                number,
                waited_s,
                what,
                self._names(again),
            )
            group.abort(
                f"{what} timed out: could not reach {self._names(again)} for {_LOOK_AGAIN_S:.0f} s"
            )


class BusyLinks:
    """Determines the busiest connection of a group from the traffic between two checks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.busiest: BusyLink | None = None
        self._clock = clock
        self._looked_at = 0.0
        self._before: tuple[int, Mapping[str, Traffic]] = (0, {})

    def look(self, generation: Generation, traffic: Mapping[str, Traffic]) -> None:
        """Updates `busiest` from the group's traffic. May be called often, but compares the traffic
        only every few seconds."""
        now = self._clock()
        passed_s = now - self._looked_at
        number, before = self._before
        if number == generation.number and passed_s < _TRAFFIC_EVERY_S:
            return
        self._looked_at, self._before = now, (generation.number, traffic)
        self.busiest = None
        if number != generation.number:
            return
        busy = {a: t.busy_s - before[a].busy_s for a, t in traffic.items() if a in before}
        address = max(busy, key=busy.__getitem__, default="")
        if not busy or busy[address] < _MOSTLY * passed_s:
            return
        ranks = _ranks_at(generation, address)
        if not ranks:
            return
        sent = traffic[address].acknowledged_bytes - before[address].acknowledged_bytes
        self.busiest = BusyLink(rank=ranks[0], bytes_per_s=sent / busy[address])


def _ranks_at(generation: Generation, address: str) -> list[int]:
    """Returns the ranks whose donor address has the host `address`. If this member does not know
    all peers, considers only the ranks that it probes (`neighbours`)."""
    try:
        peers = generation.known or generation.peers_of(
            neighbours(generation.rank, generation.world_size)
        )
    except GENERATION_OVER_OR_AWAY:
        return []
    return [
        peer.rank
        for peer in peers
        if peer.donor_address and parse_address(peer.donor_address).host == address
    ]


def looked_at(generation: Generation) -> dict[int, str]:
    """Returns the donor addresses to probe after a group has failed, by rank. These are the
    addresses of all other ranks or, in a large world, only of this rank's neighbors. Raises
    MembershipChanged or UnavailableError."""
    large = generation.world_size > MOST_SENT_WHOLE
    peers = (
        generation.peers_of(neighbours(generation.rank, generation.world_size))
        if large
        else generation.peers
    )
    return {
        peer.rank: peer.donor_address
        for peer in peers
        if peer.rank != generation.rank and peer.donor_address
    }


def named_ranks(generation: Generation | None, ranks: Sequence[int]) -> str:
    """Formats a list of ranks for people, with their hosts if those are known or can be
    requested."""
    hosts: dict[int, str] = {}
    if generation is not None:
        with suppress(*GENERATION_OVER_OR_AWAY):
            hosts = {
                peer.rank: peer.host
                for peer in generation.peers_of(
                    [rank for rank in ranks if rank < generation.world_size]
                )
            }
    return ", ".join(f"rank {rank} ({hosts.get(rank, 'gone')})" for rank in ranks)


def named_addresses(generation: Generation | None, ranks: Sequence[int]) -> str:
    """Formats a list of ranks for people, with their hosts and probed addresses if those are known
    or can be requested."""
    peers: dict[int, Peer] = {}
    if generation is not None:
        with suppress(*GENERATION_OVER_OR_AWAY):
            peers = {
                peer.rank: peer
                for peer in generation.peers_of(
                    [rank for rank in ranks if rank < generation.world_size]
                )
            }
    return ", ".join(
        f"rank {r} ({peers[r].host}) at {peers[r].donor_address}"
        if r in peers
        else f"rank {r} (gone)"
        for r in ranks
    )


def neighbours(rank: int, world_size: int) -> list[int]:
    """Returns the ranks that `rank` probes in a large world."""
    if world_size <= _MOST_PEERS:
        return [other for other in range(world_size) if other != rank]
    steps = [1 << power for power in range(world_size.bit_length())]
    return sorted(
        {(rank + sign * step) % world_size for step in steps for sign in (1, -1)} - {rank}
    )
