"""A member of a large world learns the ranks from the changes that are announced, and asks for the
ranks of other peers when it needs them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from shoal_common.errors import InternalError, MembershipChanged, UnavailableError
from shoal_common.formats import rank_table
from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_worker.elastic.contract.generation import Generation, Peer, Topology
from shoal_worker.elastic.coordinator.coordinator_messages import parse_generation

MINE = Peer(rank=0, member_id="c", host="h1", donor_address="h1:3", joining=False)


def entry(name: str, rank: int) -> pb.Rank:
    return pb.Rank(rank=rank, member_id=name, host=f"h{rank // 2}", donor_address=f"h:{rank + 1}")


class Coordinator:
    """Answers which members are in the newest generation and counts the requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.tables: dict[int, list[pb.Rank]] = {}

    def ask(self, number: int, nonce: str, ranks: Sequence[int]) -> list[Peer]:
        self.asked.append(tuple(ranks))
        if number != max(self.tables):
            raise MembershipChanged(f"generation {number} is over")
        table = self.tables[number]
        return [
            Peer(
                rank=r.rank,
                member_id=r.member_id,
                host=r.host,
                donor_address=r.donor_address,
                joining=False,
            )
            for r in (table[rank] for rank in (ranks or range(len(table))))
        ]

    def announce(
        self,
        number: int,
        table: list[pb.Rank],
        before: Generation | None,
        *,
        change: pb.RankChange | None = None,
        digest: bytes = b"",
    ) -> Generation:
        table = [
            pb.Rank(rank=rank, member_id=r.member_id, host=r.host, donor_address=r.donor_address)
            for rank, r in enumerate(table)
        ]
        self.tables[number] = table
        message = pb.Generation(
            number=number,
            nonce="0" * 32,
            world_size=len(table),
            table_digest=digest
            or rank_table.digest(
                rank_table.line(r.member_id, r.host, r.donor_address, "") for r in table
            ),
            joining=[1, 2],
            most_local_ranks=2,
            change=change,
        )
        mine = next(r.rank for r in table if r.member_id == "c")
        return parse_generation(
            pb.MemberDirective(generation=message, rank=mine), MINE, before, self.ask
        )


TABLE = [entry(name, rank) for rank, name in enumerate("abcdef")]
WITHOUT_B = [each for each in TABLE if each.member_id != "b"]


@pytest.mark.parametrize("whole", [True, False])
def test_first_generation_of_a_run_is_recognized_by_its_cause_since_numbers_continue(
    whole: bool,
) -> None:
    for cause, begins in (
        (pb.Generation.CAUSE_START, True),
        (pb.Generation.CAUSE_FAILURE, False),
        (pb.Generation.CAUSE_BORDER, False),
    ):
        message = pb.Generation(
            number=8, nonce="0" * 32, cause=cause, world_size=6, ranks=TABLE if whole else ()
        )
        generation = parse_generation(
            pb.MemberDirective(generation=message, rank=2), MINE, None, Coordinator().ask
        )
        assert generation.begins_run is begins


def test_member_receives_what_it_needs_to_form_its_group_without_asking() -> None:
    coordinator = Coordinator()
    generation = coordinator.announce(1, TABLE, None)
    assert (generation.rank, generation.world_size, generation.me.member_id) == (2, 6, "c")
    assert generation.topology == Topology(world_size=6, most_local=2)
    assert generation.joining == {1, 2}
    assert generation.part([2, 4]).world_size == 2
    assert coordinator.asked == []
    assert generation.known is None


def test_peers_are_requested_once() -> None:
    coordinator = Coordinator()
    generation = coordinator.announce(1, TABLE, None)
    for _ in range(2):
        assert [peer.member_id for peer in generation.peers_of([0, 2, 5])] == ["a", "c", "f"]
        assert generation.part([2, 5]).peers[1].member_id == "f"
    assert coordinator.asked == [(0, 5)]


def test_member_with_the_table_applies_changes_without_asking() -> None:
    coordinator = Coordinator()
    first = coordinator.announce(1, TABLE, None)
    assert [peer.member_id for peer in first.peers] == list("abcdef")
    second = coordinator.announce(2, WITHOUT_B, first, change=pb.RankChange(since=1, removed=[1]))
    third = coordinator.announce(
        3,
        [*WITHOUT_B, entry("g", 5)],
        second,
        change=pb.RankChange(
            since=2, added=[pb.Rank(rank=5, member_id="g", host="h2", donor_address="h:6")]
        ),
    )
    assert [(peer.rank, peer.member_id) for peer in third.peers] == list(enumerate("acdefg"))
    assert third.rank == 1
    assert coordinator.asked == [()]


@pytest.mark.parametrize(
    "change",
    [
        pb.RankChange(since=1, removed=[2]),
        pb.RankChange(since=1, removed=[9]),
        pb.RankChange(since=1, removed=[1], added=[pb.Rank(rank=7, member_id="x")]),
    ],
    ids=["another table follows", "an unknown rank", "a gap"],
)
def test_change_that_does_not_match_the_tables_digest_triggers_a_request(
    change: pb.RankChange,
) -> None:
    coordinator = Coordinator()
    first = coordinator.announce(1, TABLE, None)
    assert first.known is None
    list(first.peers)
    second = coordinator.announce(2, WITHOUT_B, first, change=change)
    assert second.known is None
    assert [peer.member_id for peer in second.peers] == list("acdef")
    assert coordinator.asked == [(), ()]


def test_a_member_that_missed_a_generation_asks() -> None:
    coordinator = Coordinator()
    first = coordinator.announce(1, TABLE, None)
    list(first.peers)
    third = coordinator.announce(3, WITHOUT_B, first, change=pb.RankChange(since=2))
    assert third.known is None
    assert [peer.member_id for peer in third.peers] == list("acdef")


def test_joiner_requests_what_it_needs() -> None:
    coordinator = Coordinator()
    joined = coordinator.announce(7, WITHOUT_B, None, change=pb.RankChange(since=6, removed=[1]))
    assert [peer.donor_address for peer in joined.peers_of([0, 4])] == ["h:1", "h:6"]
    assert coordinator.asked == [(0, 4)]


def test_peers_of_an_ended_generation_are_unavailable() -> None:
    coordinator = Coordinator()
    first = coordinator.announce(1, TABLE, None)
    coordinator.announce(2, WITHOUT_B, first)
    with pytest.raises(MembershipChanged, match="is over"):
        list(first.peers)


def test_table_with_an_unexpected_digest_is_rejected() -> None:
    generation = Coordinator().announce(1, TABLE, None, digest=b"another's")
    with pytest.raises(UnavailableError, match="digest"):
        list(generation.peers)
    assert generation.known is None


@pytest.mark.parametrize("rank", [-1, 6])
def test_rank_outside_the_world_is_refused(rank: int) -> None:
    message = pb.MemberDirective(generation=pb.Generation(number=1, world_size=6), rank=rank)
    with pytest.raises(InternalError, match=f"rank {rank} of 6"):
        parse_generation(message, MINE, None, Coordinator().ask)
