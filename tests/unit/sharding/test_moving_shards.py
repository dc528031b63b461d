"""Shards that were split for one number of ranks arrive complete at a different number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_worker.engine.state.holders import Claim, ShardHolders, ShardsLostError, newest_complete
from shoal_worker.sharding.layout import UnitLayout, message, place, runs, sizes


def layout(numel: int, world_size: int) -> UnitLayout:
    return UnitLayout(shapes=(torch.Size([numel]),), world_size=world_size)


@settings(max_examples=60)
@given(
    numel=st.integers(1, 200),
    old_world=st.integers(1, 5),
    new_world=st.integers(1, 6),
    dead=st.integers(0, 4),
)
def test_every_element_arrives_at_its_new_holders(
    numel: int, old_world: int, new_world: int, dead: int
) -> None:
    old, new = layout(numel, old_world), layout(numel, new_world)
    whole = torch.arange(old.padded_numel, dtype=torch.float64)
    # Rank r had position r and that of its predecessor. One rank is gone, and the others are the
    # first ranks of the new group.
    alive = [r for r in range(old_world) if r != dead or old_world == 1][:new_world]
    held = {
        number: {
            p: whole[p * old.shard_numel :][: old.shard_numel] for p in {r, (r - 1) % old_world}
        }
        for number, r in enumerate(alive)
    }
    holders = {p: [rank for rank, shards in held.items() if p in shards] for p in range(old_world)}
    claims = [
        Claim(rank=rank, cut=1, shards=old_world, places=list(shards), copied=False)
        for rank, shards in held.items()
    ]
    if not all(holders.values()):
        with pytest.raises(ShardsLostError, match=r"no rank holds (\d of the model's|any shard)"):
            newest_complete(claims)
        return
    sends = newest_complete(claims).senders()
    gets = [sorted({rank, (rank - 1) % new_world}) for rank in range(new_world)]
    table = runs(old=old, new=new, sends=sends, gets=gets)
    empty = {0: torch.empty(0, dtype=torch.float64)}
    sent = [
        message(table, rank, held.get(rank, empty)).split(sizes(table, rank)[1])
        for rank in range(new_world)
    ]
    for rank in range(new_world):
        received = torch.cat([parts[rank] for parts in sent])
        assert [len(parts[rank]) for parts in sent] == sizes(table, rank)[0]
        shards = {
            position: torch.full((new.shard_numel,), -1.0, dtype=torch.float64)
            for position in gets[rank]
        }
        place(table, rank, received, shards)
        for position, shard in shards.items():
            expected = torch.arange(numel, dtype=torch.float64)[
                position * new.shard_numel : (position + 1) * new.shard_numel
            ]
            assert shard[: len(expected)].equal(expected)
            assert (shard[len(expected) :] == -1).all()


def test_holders_share_the_sending() -> None:
    held = ShardHolders(cut=1, shards=3, holders={0: [0, 1], 1: [1, 2], 2: [2, 0]})
    assert sorted(held.senders().values()) == [0, 1, 2]
