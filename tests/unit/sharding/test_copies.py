"""Copies of shards are placed so that each shard has two holders among the ranks that stay. Also
tests where shards are taken from afterwards."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from shoal_worker.elastic.contract.channel import LocalChannel
from shoal_worker.engine.state.holders import (
    Claim,
    SendingTurns,
    ShardHolders,
    ShardsLostError,
    newest_complete,
    plan_copies,
)
from shoal_worker.sharding.layout import Division
from shoal_worker.sharding.resharding import (
    MOST_COPIES,
    WHOLE,
    Cut,
    RankShards,
    division_cut,
    held_of,
    merge_copies,
    newest_of,
    rows_of,
)
from shoal_worker.sharding.unsharded_vectors import copy_singles


def holders_of(
    world_size: int, gone: Sequence[int] = (), copies: Sequence[tuple[int, int]] = ()
) -> ShardHolders[int]:
    """Returns the holders of a cut in which each rank has its own shard and mirrors the previous
    one, without the ranks `gone`. `copies` has pairs of a position and its additional mirror
    holder."""
    division = Division(world_size=world_size, shards=world_size)
    rows: list[list[int]] = []
    for rank in range(world_size):
        own = (
            [RankShards(cut=division_cut(division, rank, 3), vectors=[])]
            if rank not in gone
            else []
        )
        kept = [
            position
            for position, mirror_holder in copies
            if mirror_holder == rank and rank not in gone
        ]
        vectors = [{position: {"": torch.zeros(1)} for position in kept}]
        rows.append(
            rows_of(own + merge_copies([], ShardHolders(cut=3, shards=world_size), vectors))
        )
    return newest_of(rows)


def test_shards_of_a_leaving_rank_are_copied_to_others() -> None:
    copies = plan_copies(holders_of(4), range(4), [1])
    assert [(copy.place, copy.sender) for copy in copies] == [(0, 0), (1, 1)]
    assert all(copy.mirror_holder in (2, 3) for copy in copies if copy.place == 0)
    assert all(copy.mirror_holder in (0, 3) for copy in copies if copy.place == 1)


def test_nothing_is_copied_where_all_ranks_have_everything() -> None:
    assert plan_copies(holders_of(2), range(2), []) == []


def test_copied_shard_is_not_copied_again() -> None:
    first = plan_copies(holders_of(4, gone=[1]), [0, 2, 3], [])
    assert {copy.place for copy in first} == {0, 1}
    assert (
        plan_copies(
            holders_of(4, gone=[1], copies=[(copy.place, copy.mirror_holder) for copy in first]),
            [0, 2, 3],
            [],
        )
        == []
    )


def test_a_cut_that_has_lost_a_shard_is_lost() -> None:
    with pytest.raises(ShardsLostError, match="no rank holds 1 of the model's 4 shards"):
        holders_of(4, gone=[1, 2])


def test_all_shards_are_lost_if_none_has_been_reported() -> None:
    with pytest.raises(ShardsLostError, match="no rank holds any shard"):
        holders_of(2, gone=[0, 1])


def test_successive_deaths_spread_copies_over_all_ranks_without_overloading_one() -> None:
    gone: list[int] = []
    copies: list[tuple[int, int]] = []
    for dead in (9, 7, 5, 3):
        gone.append(dead)
        copies = [
            (position, mirror_holder) for position, mirror_holder in copies if mirror_holder != dead
        ]
        left = [rank for rank in range(10) if rank not in gone]
        copies += [
            (copy.place, copy.mirror_holder)
            for copy in plan_copies(holders_of(10, gone, copies), left, [], most=MOST_COPIES)
        ]
        now = holders_of(
            10, gone, copies
        )  # raises an error if a rank has more copies than it can report
        assert all(len(now.having(position)) == 2 for position in range(10))
    counts = [
        sum(mirror_holder == rank for _, mirror_holder in copies) for rank in (0, 1, 2, 4, 6, 8)
    ]
    assert max(counts) - min(counts) <= 1


def test_own_shards_are_preferred_over_copies_as_sources() -> None:
    now = holders_of(3, copies=[(0, 2)])
    assert now.sources()[0] == [0, 1]
    assert holders_of(3, gone=[0, 1], copies=[(0, 2)]).sources()[0] == [2]


def test_own_shards_and_copies_of_one_cut_are_reported_together() -> None:
    own = RankShards(
        cut=division_cut(Division(world_size=4, shards=4), 2, 3),
        vectors=[{2: {"": torch.ones(1)}, 1: {"": torch.ones(1)}}],
    )
    copies = merge_copies(
        [], ShardHolders(cut=3, shards=4), [{0: {"": torch.zeros(1)}, 3: {"": torch.zeros(1)}}]
    )
    merged = held_of([own, *copies], 3)
    assert merged is not None
    assert sorted(merged.vectors[0]) == [0, 1, 2, 3]
    assert held_of(copies, 2) is None


def test_ranks_of_a_mesh_have_places_instead_of_positions() -> None:
    places = [(stage, 0, position) for stage in range(2) for position in range(2)]
    rows = [(0, places[:2]), (1, places[:2]), (2, places[2:]), (3, places[2:])]
    held = newest_complete(
        Claim(rank=rank, cut=1, shards=4, places=own, copied=False) for rank, own in rows
    )
    assert sorted(held.senders().values()) == [0, 1, 2, 3]
    assert [
        (copy.place, copy.sender, copy.mirror_holder) for copy in plan_copies(held, range(4), [3])
    ] == [(places[2], 2, 0), (places[3], 2, 1)]


def test_rank_that_has_sent_least_sends_next() -> None:
    turns = SendingTurns()
    assert [turns.choose([0, 1], amount) for amount in (10, 3, 3, 3, 3)] == [0, 1, 1, 1, 1]
    assert turns.choose([0, 1]) == 0


def test_mesh_ranks_keep_as_many_copies_as_there_are_shards_left() -> None:
    places = [(0, 0, position) for position in range(8)]
    held = {rank: {places[rank], places[rank - 1]} for rank in range(8)}
    for dead in range(7, 0, -1):
        del held[dead]
        now = newest_complete(
            Claim(rank=rank, cut=1, shards=8, places=own, copied=False)
            for rank, own in held.items()
        )
        for copy in plan_copies(now, list(held), []):
            held[copy.mirror_holder].add(copy.place)
    assert held == {0: set(places)}


class TwoRanks(LocalChannel):
    """A channel between two ranks as seen by rank 0. Rank 1 has no shard and answers
    accordingly."""

    rank, world_size = 0, 2

    def exchange(self, payload: bytes) -> list[bytes]:
        return [payload, json.dumps(rows_of([])).encode()]


@pytest.mark.parametrize(
    "cut",
    [WHOLE, division_cut(Division(world_size=3, shards=3), 0, 3)],
    ids=["complete", "a shard is lost"],
)
def test_complete_or_lost_state_needs_no_copies(cut: Cut) -> None:
    assert copy_singles([], [RankShards(cut=cut, vectors=[])], [], TwoRanks(), []) is None
