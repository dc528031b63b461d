"""A generation as a member sees it: one agreed membership with ranks.

Small worlds are told whole. Of a large one a member is told what it needs to work in it: its rank,
how many there are, how they lie on hosts, who holds no state. Who the others are it asks when it
has to know, of some or of all, and what it knows of all it keeps: the next generation says what has
changed.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from shoal_common import rank_table
from shoal_common.errors import CorruptDataError, UnavailableError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One rank of a generation."""

    rank: int
    member_id: str
    host: str
    donor_address: str
    """host:port where it gives its state to others."""
    joining: bool
    """It had no rank in the generation before."""
    donor_key: str = ""
    """What opens its donor between generations; empty: nothing does."""

    @cached_property
    def line(self) -> str:
        """What the table's digest covers of it."""
        return rank_table.line(self.member_id, self.host, self.donor_address, self.donor_key)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """How ranks lie on hosts. Those of one host are adjacent."""

    world_size: int
    most_local: int
    """Ranks of the host that has most of them."""


def topology_of(hosts: Sequence[str]) -> Topology:
    """`hosts`: of the ranks, at least one."""
    return Topology(world_size=len(hosts), most_local=max(Counter(hosts).values()))


class AskedPeers(Sequence[Peer]):
    """The ranks of a large world, asked for when somebody has to know. May be used by any thread.

    Reading raises what asking does: MembershipChanged when there is a newer generation,
    UnavailableError when the coordinator is away.
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
        """`digest`: of the whole table. `ask` gives the peers of these ranks, or all for none.
        `follow` makes all of them out of an older table, without asking; CorruptDataError where
        that does not fit."""
        self.joining = joining
        self._size, self._digest = size, digest
        self._ask, self._follow = ask, follow
        self._lock = threading.Lock()
        self._known = {mine.rank: mine}
        self._whole: tuple[Peer, ...] | None = None

    def settle(self) -> tuple[Peer, ...] | None:
        """All of them, if that is known without asking. The older table is not needed from here
        on."""
        with self._lock:
            follow, self._follow = self._follow, None
            if self._whole is None and follow is not None:
                self._whole = self._followed(follow)
            return self._whole

    def of(self, ranks: Sequence[int]) -> list[Peer]:
        """Those of these ranks."""
        whole = self.settle()
        if whole is not None:
            return [whole[rank] for rank in ranks]
        missing = [rank for rank in ranks if rank not in self._known]
        if missing:  # without the lock: the link's thread must never wait for an answer
            found = {peer.rank: peer for peer in self._ask(missing)}
            with self._lock:
                self._known = {**self._known, **found}
        return [self._known[rank] for rank in ranks]

    def all(self) -> tuple[Peer, ...]:
        """All peers of the generation, by rank."""
        whole = self.settle()
        if whole is not None:
            return whole
        table = tuple(self._ask(()))
        if not self._is_right(table):
            raise UnavailableError(
                f"the coordinator told a table of {len(table)} ranks whose digest is not that of "
                f"the generation, which has {self._size}: ask again",
                reason="TABLE_DAMAGED",
            )
        with self._lock:
            self._whole = table
        return table

    def part(self, ranks: Sequence[int]) -> SomePeers:
        """Some of them, in this order."""
        return SomePeers(self, ranks)

    def _followed(self, follow: Callable[[], Sequence[Peer]]) -> tuple[Peer, ...] | None:
        try:
            table = tuple(follow())
        except CorruptDataError as error:
            _log.warning(
                "the generation's table is asked for, since it does not follow from the one "
                "before: %s",
                error,
            )
            return None
        if self._is_right(table):
            return table
        _log.warning(
            "the generation's table is asked for: what follows from the one before has another "
            "digest"
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
    """Some ranks of a large world, in an order of their own: those of a part of a group."""

    def __init__(self, peers: AskedPeers, ranks: Sequence[int]) -> None:
        self._peers, self._ranks = peers, ranks

    @property
    def joining(self) -> frozenset[int]:
        """Which of them hold no state."""
        return frozenset(
            position for position, rank in enumerate(self._ranks) if rank in self._peers.joining
        )

    def of(self, positions: Sequence[int]) -> list[Peer]:
        """Those at these positions."""
        return self._peers.of([self._ranks[position] for position in positions])

    def part(self, positions: Sequence[int]) -> SomePeers:
        """Some of them, in this order."""
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
    """One agreed membership, from the point of view of `rank`."""

    number: int
    nonce: str
    """Makes store prefixes and transfers of this generation unmistakable."""
    peers: tuple[Peer, ...] | AskedPeers | SomePeers
    """In rank order. How many there are is always known; in a large world reading them may ask the
    coordinator (`AskedPeers`)."""
    rank: int
    """This member's own."""
    interrupts_below: int
    """Members that work in a generation below this number leave it at once; others at their next
    border."""
    told_topology: Topology | None = None
    """None: it is read off the peers."""
    begins_run: bool = False
    """It is the first of its run. Its number does not say so: those of a job's runs go on."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.peers)

    @property
    def me(self) -> Peer:
        """This member's own entry."""
        return self.peers[self.rank]

    @property
    def known(self) -> Sequence[Peer] | None:
        """All peers, where nobody has to be asked for them."""
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
        """How the ranks lie on hosts."""
        return self.told_topology or topology_of([peer.host for peer in self.peers])

    @property
    def joining(self) -> frozenset[int]:
        """Ranks that had none in the generation before."""
        peers = self.peers
        return (
            frozenset(peer.rank for peer in peers if peer.joining)
            if isinstance(peers, tuple)
            else peers.joining
        )

    def peers_of(self, ranks: Sequence[int]) -> list[Peer]:
        """Those of these ranks, asked for at once where they are not known."""
        peers = self.peers
        return [peers[rank] for rank in ranks] if isinstance(peers, tuple) else peers.of(ranks)

    def part(self, ranks: Sequence[int]) -> Generation:
        """Some of its ranks, in this order, with this member among them."""
        peers = self.peers
        some = (
            tuple(peers[rank] for rank in ranks) if isinstance(peers, tuple) else peers.part(ranks)
        )
        return replace(self, peers=some, rank=list(ranks).index(self.rank), told_topology=None)


@dataclass(frozen=True, kw_only=True)
class MemberIdentity:
    """What a member tells of itself when it joins."""

    job_id: str
    member_id: str
    host: str
    pid: int
    launcher_id: str = ""
    """Whoever reports its end; empty: nobody does."""
    local_index: int = 0
    donor_address: str = ""
    """host:port where it gives its state to others; empty: it has none to give."""
    donor_key: str = ""
    """What opens its donor between generations: see `StateDonor.key`."""
    metrics_address: str = ""
