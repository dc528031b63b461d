"""A generation as a member sees it: one agreed membership with ranks."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_common.errors import InternalError
from shoal_protos.v1 import coordinator_pb2 as pb


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

    @classmethod
    def parse(cls, message: pb.Generation, member_id: str) -> Generation:
        """Reads what the coordinator sent.

        Raises:
            InternalError: the generation does not hold this member: the coordinator only sends a generation to its members.
        """
        peers = tuple(
            Peer(
                rank=r.rank,
                member_id=r.member_id,
                host=r.host,
                donor_address=r.donor_address,
                joining=r.joining,
                donor_key=r.donor_key,
            )
            for r in message.ranks
        )
        mine = [p.rank for p in peers if p.member_id == member_id]
        if len(mine) != 1 or [p.rank for p in peers] != list(range(len(peers))):
            raise InternalError(f"generation {message.number} does not give member {member_id} one rank among {len(peers)} dense ones")
        return cls(number=message.number, nonce=message.nonce, peers=peers, rank=mine[0], interrupts_below=message.interrupts_below)
