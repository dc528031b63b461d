"""A generation from a member's perspective: one agreed list of members with their ranks.

In a small world, a member receives the full table of ranks. In a large world, it receives only its
rank, the world size, the distribution of ranks across hosts, and the list of ranks that have no
state yet. It requests details of other ranks on demand. Once a member has the full table, it
receives only the changes of later generations.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from shoal_common.errors import CorruptDataError, UnavailableError
from shoal_common.formats import rank_table

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One rank of a generation, as other members see it."""

    rank: int
    member_id: str
    host: str
    donor_address: str
    """host:port where other ranks can fetch this rank's state."""
    joining: bool
    """True if this member had no rank in the previous generation and therefore has no state yet."""
    donor_key: str = ""
    """Key that lets other ranks fetch state from this rank's `StateDonor` between generations;
    empty: no access."""

    @cached_property
    def line(self) -> str:
        """This peer as one line of text. The rank table's digest covers these lines."""
        return rank_table.line(self.member_id, self.host, self.donor_address, self.donor_key)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Distribution of ranks across hosts. The ranks of one host are adjacent."""

    world_size: int
    most_local: int
    """Number of ranks on the host with the most ranks."""


def topology_of(hosts: Sequence[str]) -> Topology:
    """Computes the topology. `hosts`: the host of each rank; not empty."""
    return Topology(world_size=len(hosts), most_local=max(Counter(hosts).values()))


class AskedPeers(Sequence[Peer]):
    """All peers of a large world, as a sequence. A peer is requested from the coordinator when it
    is first read. Thread-safe.

    Every read may raise the request's errors: MembershipChanged if there is a newer generation,
    UnavailableError if the coordinator is unavailable.
    """

    def __init__(
        self,
        *,
        mine: Peer,
        size: int,
        joining: frozenset[int],
        digest: bytes,
        ask: Callable[[Sequence[int]], list[Peer]],
        follow: Callable[[], Sequence[Peer]] | None = None,
    ) -> None:
        """`digest`: digest of the full rank table. `ask`: requests the peers with the given ranks
        from the coordinator, or all peers if no ranks are given. `follow`: derives all peers from
        an older table without a request; raises CorruptDataError if that table does not match."""
        self.joining = joining
        self._size, self._digest = size, digest
        self._ask, self._follow = ask, follow
        self._lock = threading.Lock()
        self._known = {mine.rank: mine}
        self._whole: tuple[Peer, ...] | None = None

    def settle(self) -> tuple[Peer, ...] | None:
        """Returns all peers if they can be determined without a request, otherwise None. Calls
        `follow` at most once, and then releases the older table."""
        with self._lock:
            follow, self._follow = self._follow, None
            if self._whole is None and follow is not None:
                self._whole = self._followed(follow)
            return self._whole

    def of(self, ranks: Sequence[int]) -> list[Peer]:
        """Returns the peers with these ranks. If some of them are not known yet, first requests
        those from the coordinator."""
        whole = self.settle()
        if whole is not None:
            return [whole[rank] for rank in ranks]
        missing = [rank for rank in ranks if rank not in self._known]
        if missing:  # not under the lock, because the link's thread must never wait
            found = {peer.rank: peer for peer in self._ask(missing)}
            with self._lock:
                self._known = {**self._known, **found}
        return [self._known[rank] for rank in ranks]

    def all(self) -> tuple[Peer, ...]:
        """Returns all peers of the generation, by rank."""
        whole = self.settle()
        if whole is not None:
            return whole
        table = tuple(self._ask(()))
        if not self._is_right(table):
            raise UnavailableError(
                f"the coordinator sent a rank table with {len(table)} entries whose digest does "
                f"not match that of the generation ({self._size} ranks); retry",
                reason="TABLE_DAMAGED",
            )
        with self._lock:
            self._whole = table
        return table

    def part(self, ranks: Sequence[int]) -> SomePeers:
        """Returns the peers with these ranks, in this order."""
        return SomePeers(self, ranks)

    def _followed(self, follow: Callable[[], Sequence[Peer]]) -> tuple[Peer, ...] | None:
        try:
            table = tuple(follow())
        except CorruptDataError as error:
            _log.warning(
                "requesting the full list of the generation's ranks from the coordinator, "
                "because it could not be derived from that of the previous generation: %s",
                error,
            )
            return None
        if self._is_right(table):
            return table
        _log.warning(
            "requesting the full list of the generation's ranks from the coordinator, because "
            "the list derived from that of the previous generation does not have the expected "
            "size and digest"
        )
        return None

    def _is_right(self, table: tuple[Peer, ...]) -> bool:
        return (
            len(table) == self._size
            and rank_table.digest(peer.line for peer in table) == self._digest
        )

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Peer]:
        return iter(self.all())

    @overload
    def __getitem__(self, rank: int) -> Peer: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[Peer]: ...
    def __getitem__(self, rank: int | slice) -> Peer | Sequence[Peer]:
        ranks = range(self._size)[rank]
        return self.of(ranks) if isinstance(ranks, range) else self.of([ranks])[0]


class SomePeers(Sequence[Peer]):
    """Peers of selected ranks of a large world, in a given order."""

    def __init__(self, peers: AskedPeers, ranks: Sequence[int]) -> None:
        self._peers, self._ranks = peers, ranks

    @property
    def joining(self) -> frozenset[int]:
        """Indices, within this sequence, of the ranks that joined without state."""
        return frozenset(
            position for position, rank in enumerate(self._ranks) if rank in self._peers.joining
        )

    def of(self, positions: Sequence[int]) -> list[Peer]:
        """Returns the peers at these positions."""
        return self._peers.of([self._ranks[position] for position in positions])

    def part(self, positions: Sequence[int]) -> SomePeers:
        """Returns the peers at these positions, in this order."""
        return SomePeers(self._peers, [self._ranks[position] for position in positions])

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.of(self._ranks))

    @overload
    def __getitem__(self, position: int) -> Peer: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[Peer]: ...
    def __getitem__(self, position: int | slice) -> Peer | Sequence[Peer]:
        ranks = self._ranks[position]
        return self._peers.of([ranks])[0] if isinstance(ranks, int) else self._peers.of(ranks)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One agreed list of members, from the perspective of the member with rank `rank`."""

    number: int
    nonce: str
    """Random text that makes the names of this generation's stores and transfers unique."""
    peers: tuple[Peer, ...] | AskedPeers | SomePeers
    """All ranks' peers, in rank order. In a large world, reading an entry may send a request to the
    coordinator (`AskedPeers`); the length is always known."""
    rank: int
    """Rank of this member."""
    interrupts_below: int
    """Members whose generation number is lower than this must leave that generation immediately.
    Other members leave their generation at the next step boundary."""
    sent_topology: Topology | None = None
    """Distribution of the ranks across hosts; None: it is computed from the peers."""
    begins_run: bool = False
    """True if this is the first generation of its run. This cannot be seen from `number`, because
    numbers continue across a job's runs."""

    @cached_property
    def world_size(self) -> int:
        """Number of ranks in this generation."""
        return len(self.peers)

    @property
    def me(self) -> Peer:
        """This member's own entry among the peers."""
        return self.peers[self.rank]

    @property
    def known(self) -> Sequence[Peer] | None:
        """All peers if they are known without a request, otherwise None."""
        peers = self.peers
        return (
            peers
            if isinstance(peers, tuple)
            else peers.settle()
            if isinstance(peers, AskedPeers)
            else None
        )

    @property
    def topology(self) -> Topology:
        """Distribution of the ranks across hosts."""
        return self.sent_topology or topology_of([peer.host for peer in self.peers])

    @property
    def joining(self) -> frozenset[int]:
        """Ranks of members that had no rank in the previous generation."""
        peers = self.peers
        return (
            frozenset(peer.rank for peer in peers if peer.joining)
            if isinstance(peers, tuple)
            else peers.joining
        )

    def peers_of(self, ranks: Sequence[int]) -> list[Peer]:
        """Returns the peers with these ranks. Sends at most one request, for all ranks that are not
        known yet."""
        peers = self.peers
        return [peers[rank] for rank in ranks] if isinstance(peers, tuple) else peers.of(ranks)

    def part(self, ranks: Sequence[int]) -> Generation:
        """Returns the generation reduced to these ranks, in this order. `ranks` must include this
        member's rank."""
        peers = self.peers
        some = (
            tuple(peers[rank] for rank in ranks) if isinstance(peers, tuple) else peers.part(ranks)
        )
        return replace(self, peers=some, rank=list(ranks).index(self.rank), sent_topology=None)


@dataclass(frozen=True, kw_only=True)
class MemberIdentity:
    """Information about a member that the member sends to the coordinator when it joins."""

    job_id: str
    member_id: str
    host: str
    pid: int
    launcher_id: str = ""
    """Id of the launcher that reports the end of the member's process; empty if there is none."""
    local_index: int = 0
    donor_address: str = ""
    """host:port where other ranks can fetch this member's state; empty if it has no state to
    send."""
    donor_key: str = ""
    """Key that lets other ranks fetch state from this member's `StateDonor` between generations;
    see `StateDonor.key`."""
    metrics_address: str = ""
