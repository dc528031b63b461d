"""Which shards are copied to which ranks, so that two ranks of those that stay have each, and where shards are taken from then."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from shoal_worker.sharding.layout import Division
from shoal_worker.sharding.resharding import Held, Told, division_cut, held_of, merge_copies, newest_complete, plan_copies, rows_of


def told(world_size: int, gone: Sequence[int] = (), copies: Sequence[tuple[int, int]] = ()) -> Told:
    """A cut in which each rank holds its shard and mirrors the one before, without the ranks `gone`; `copies`: (position, keeper)."""
    division = Division(world_size=world_size, shards=world_size)
    rows: list[list[int]] = []
    for rank in range(world_size):
        own = [Held(cut=division_cut(division, rank, 3), vectors=[])] if rank not in gone else []
        kept = [position for position, keeper in copies if keeper == rank and rank not in gone]
        vectors = [{position: {"": torch.zeros(1)} for position in kept}]
        rows.append(rows_of(own + merge_copies([], Told(number=3, world_size=world_size), vectors)))
    return newest_complete(rows)


def test_what_a_rank_that_leaves_holds_is_copied_to_others() -> None:
    copies = plan_copies(told(4), range(4), [1])
    assert [(copy.position, copy.sender) for copy in copies] == [(0, 0), (1, 1)]
    assert all(copy.keeper in (2, 3) for copy in copies if copy.position == 0)
    assert all(copy.keeper in (0, 3) for copy in copies if copy.position == 1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_is_copied_where_all_have_all(world_size: int) -> None:
    assert plan_copies(told(world_size), range(world_size), []) == []


def test_a_shard_that_is_copied_already_is_not_copied_again() -> None:
    first = plan_copies(told(4, gone=[1]), [0, 2, 3], [])
    assert {copy.position for copy in first} == {0, 1}
    assert plan_copies(told(4, gone=[1], copies=[(copy.position, copy.keeper) for copy in first]), [0, 2, 3], []) == []


def test_nothing_is_copied_of_a_cut_that_has_lost_a_shard() -> None:
    assert plan_copies(told(4, gone=[1, 2]), [0, 3], []) == []


def test_deaths_one_after_another_spread_their_copies_over_all_ranks_and_no_rank_has_too_many() -> None:
    gone: list[int] = []
    copies: list[tuple[int, int]] = []
    for dead in (9, 7, 5, 3):
        gone.append(dead)
        copies = [(position, keeper) for position, keeper in copies if keeper != dead]
        left = [rank for rank in range(10) if rank not in gone]
        copies += [(copy.position, copy.keeper) for copy in plan_copies(told(10, gone, copies), left, [])]
        now = told(10, gone, copies)  # it would raise if a rank had more than it can tell
        assert all(len(now.having(position)) == 2 for position in range(10))
    counts = [sum(keeper == rank for _, keeper in copies) for rank in (0, 1, 2, 4, 6, 8)]
    assert max(counts) - min(counts) <= 1


def test_a_copy_stands_behind_what_a_rank_holds_itself() -> None:
    now = told(3, copies=[(0, 2)])
    assert now.sources()[0] == [0, 1]
    assert told(3, gone=[0, 1], copies=[(0, 2)]).sources()[0] == [2]


def test_what_a_rank_holds_and_copies_of_one_cut_are_told_as_one() -> None:
    own = Held(cut=division_cut(Division(world_size=4, shards=4), 2, 3), vectors=[{2: {"": torch.ones(1)}, 1: {"": torch.ones(1)}}])
    copies = merge_copies([], Told(number=3, world_size=4), [{0: {"": torch.zeros(1)}, 3: {"": torch.zeros(1)}}])
    merged = held_of([own, *copies], 3)
    assert merged is not None
    assert sorted(merged.vectors[0]) == [0, 1, 2, 3]
    assert held_of(copies, 2) is None
