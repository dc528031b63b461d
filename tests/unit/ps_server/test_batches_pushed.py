"""Which leased batches members have pushed: the server's memory, also over snapshots, recoveries and kills."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import torch
from shoal_ps_server.shard.batches import MOST_RUNS, Batches, MemberBatches
from shoal_ps_server.shard.shard import Shard
from shoal_ps_server.storage.image import Members

from tests.unit.ps_server.journaled import opened


def test_a_batch_is_finished_when_its_member_begins_another() -> None:
    batches = Batches()
    batches.begin("a", 100)
    batches.begin("a", 100)
    assert not batches.is_finished(100)
    batches.begin("a", 101)
    assert batches.is_finished(100)
    assert not batches.is_finished(101)
    batches.begin("a", 0)
    assert batches.is_finished(101)
    assert not batches.is_finished(0), "none is no batch"
    batches.forget(["a"])
    assert not batches.is_finished(100)


def test_batches_in_a_row_are_one_run_and_the_oldest_runs_are_forgotten() -> None:
    member = MemberBatches()
    for batch in range(1000, 1100):
        member.begin(batch)
    assert member.finished == [(1000, 1099)]
    for block in range(2 * MOST_RUNS):
        member.begin(5000 + 10 * block)
    assert len(member.finished) == MOST_RUNS
    assert 5000 + 10 * (2 * MOST_RUNS - 2) in member
    assert 1000 not in member


def test_a_batch_of_another_member_is_acknowledged_and_not_applied(make) -> None:
    shard = make.shard(make.spec(0), make.spec(1, tensor="bias"))
    for sequence, batch in enumerate((7, 8, 9), 1):
        for spec in (make.spec(0), make.spec(1, tensor="bias")):
            if (batch, spec.partition_id) != (9, 1):  # it dies in the middle of its third push
                shard.push(make.upload(torch.ones(6), spec, sequence=sequence, batch=batch))
    for sequence, batch in enumerate((7, 8, 9), 1):
        for spec in (make.spec(0), make.spec(1, tensor="bias")):
            outcome = shard.push(make.upload(torch.ones(6), spec, member="b", sequence=sequence, batch=batch))
            assert outcome.known_batch is ((batch, spec.partition_id) != (9, 1))
    assert [shard.version(number) for number in (0, 1)] == [4, 4]


def test_what_is_known_of_batches_is_the_same_after_a_recovery(make, tmp_path: Path) -> None:
    """Members push batch after batch to all partitions, dealt again when one dies, with snapshots and kills in between: each is applied
    once."""
    specs = [make.spec(number, tensor=f"t{number}") for number in range(3)]

    async def life(seed: int, state: dict[str, Any]) -> None:
        generator = random.Random(seed)
        async with opened(tmp_path / "data") as server:
            if server.layout is None:
                server.members = Members(generation=1, members=frozenset("abcdef"))
                server.adopt(make.layout(*specs))
                await server.configure(make.sgd(lr=1.0))
                for spec in specs:
                    await server.initialize(make.upload(torch.zeros(6), spec, sequence=0, base_version=0))
            for member in state["members"]:
                for batch in range(state["next"], state["next"] + generator.randrange(1, 6)):
                    state["next"] = batch + 1
                    state["sequences"][member] = sequence = state["sequences"].get(member, 0) + 1
                    dies = generator.random() < 0.3
                    reached = generator.randrange(len(specs)) if dies else len(specs)
                    for spec in specs[:reached]:
                        await server.push(make.upload(torch.full((6,), float(batch)), spec, member=member, sequence=sequence, batch=batch))
                    if generator.random() < 0.3:
                        await server.snapshots.write()
                    state["pushed"].setdefault(member, []).append(batch)
                    if dies:
                        state["dead"].append(member)
                        break

    async def deal_again(state: dict[str, Any]) -> None:
        """All that the dead ones had, as if nothing of it had been acknowledged."""
        async with opened(tmp_path / "data") as server:
            left = sorted(batch for member in state["dead"] for batch in state["pushed"][member])
            for sequence, batch in enumerate(left, 1):
                for spec in specs:
                    await server.push(make.upload(torch.full((6,), float(batch)), spec, member="f", sequence=sequence, batch=batch))
            check(server.shard, state)

    def check(shard: Shard, state: dict[str, Any]) -> None:
        for spec in specs:
            image = shard.image(spec.partition_id)
            assert image is not None
            assert image.values.tolist() == [-float(sum(range(1, state["next"])))] * 6

    state: dict[str, Any] = {"next": 1, "members": list("abcde"), "dead": [], "pushed": {}, "sequences": {}}
    for seed in range(8):
        asyncio.run(life(seed, state))
        state["members"] = [member for member in state["members"] if member not in state["dead"]]
    assert len(state["dead"]) > 1
    asyncio.run(deal_again(state))
