"""A generation as a member sees it: one agreed membership with ranks."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One agreed membership, from the point of view of `rank`."""

    number: int
    nonce: str
    """Makes store prefixes and transfers of this generation unmistakable."""
    peers: tuple[Peer, ...]
    """In rank order."""
    rank: int
    """This member's own."""
    interrupts_below: int
    """Members that work in a generation below this number leave it at once; others at their next border."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.peers)

    @property
    def me(self) -> Peer:
        """This member's own entry."""
        return self.peers[self.rank]
