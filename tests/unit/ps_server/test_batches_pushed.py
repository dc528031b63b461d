"""A server remembers which leased batches its members have pushed, even across snapshots,
recoveries and kills."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_common.errors import InvalidRequestError
from shoal_ps_server.shard.finished_batches import Batches
from shoal_ps_server.shard.shard import Shard
from shoal_ps_server.storage.image import Members

from tests.unit.ps_server.journaled import opened


def test_consecutive_batches_merge_whoever_has_finished_them() -> None:
    batches = Batches()
    keys = list(range(1000, 1100))
    random.Random(1).shuffle(keys)
    for number, key in enumerate(keys):
        assert key not in batches
        batches.add([key])
        assert all(each in batches for each in keys[: number + 1])
    batches.add([0, 999, 2000])
    assert sorted(batches.runs()) == [(999, 1100), (2000, 2001)]
    assert 0 not in batches, "0 means that a push has no batch"
    assert Batches(batches.runs()).runs() == batches.runs()


def test_runs_of_batches_of_two_servers_become_one() -> None:
    batches = Batches([(10, 20), (30, 40), (60, 61)])
    batches.add_runs([(20, 25), (35, 50), (5, 6), (12, 13), (1, 3)])
    assert sorted(batches.runs()) == [(1, 3), (5, 6), (10, 25), (30, 50), (60, 61)]
    assert 24 in batches
    assert 25 not in batches
    batches.add([25, 4])
    assert sorted(batches.runs()) == [(1, 3), (4, 6), (10, 26), (30, 50), (60, 61)]


def test_oldest_runs_of_batches_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr("shoal_ps_server.shard.finished_batches.MOST_RUNS", 3)
    batches = Batches()
    batches.add([10, 20, 30, 40, 41])
    assert 10 not in batches
    assert all(key in batches for key in (20, 30, 40, 41))


def test_batch_pushed_by_another_member_is_acknowledged_and_not_applied(make) -> None:
    """A batch that a dead member has pushed is acknowledged again but not applied, even if that
    member alternated between two loaders."""
    shard = make.shard(make.spec(0), make.spec(1, tensor="bias"))
    keys = [key for pair in zip(range(1000, 1200), range(5000, 5200), strict=True) for key in pair]
    acknowledged: list[int] = []
    for sequence, batch in enumerate(keys, 1):
        for spec in (make.spec(0), make.spec(1, tensor="bias")):
            if (batch, spec.partition_id) != (keys[-1], 1):
                # it dies in the middle of its last push
                shard.push(
                    make.upload(
                        torch.ones(6), spec, sequence=sequence, batch=batch, finished=acknowledged
                    )
                )
                acknowledged = []
        acknowledged = [batch]
    for sequence, batch in enumerate(keys, 1):
        for spec in (make.spec(0), make.spec(1, tensor="bias")):
            outcome = shard.push(
                make.upload(torch.ones(6), spec, member="b", sequence=sequence, batch=batch)
            )
            assert outcome.known_batch is ((batch, spec.partition_id) != (keys[-1], 1))
            again = shard.push(
                make.upload(torch.ones(6), spec, member="b", sequence=sequence, batch=batch)
            )
            assert again.duplicate
            assert again.known_batch is outcome.known_batch, "a repeated push gets the same answer"
    assert [shard.version(number) for number in (0, 1)] == [1 + len(keys)] * 2


def test_refused_or_incomplete_batch_is_not_mistaken_for_finished(make) -> None:
    """A batch that member a pushed to one partition but not to the other counts as pushed only for
    the first partition. The next member that gets the batch pushes the missing part."""
    shard = make.shard(make.spec(0), make.spec(1, tensor="bias"))
    shard.push(make.upload(torch.ones(6), make.spec(0), batch=8))
    with pytest.raises(InvalidRequestError):
        shard.push(make.upload([float("nan")] * 6, make.spec(1, tensor="bias"), batch=8))
    for sequence, spec in ((2, make.spec(0)), (1, make.spec(1, tensor="bias"))):
        shard.push(make.upload(torch.ones(6), spec, sequence=sequence, batch=9))
    outcomes = [
        shard.push(make.upload(torch.ones(6), spec, member="b", batch=8))
        for spec in (make.spec(0), make.spec(1, tensor="bias"))
    ]
    assert [outcome.known_batch for outcome in outcomes] == [True, False]
    assert [shard.version(number) for number in (0, 1)] == [3, 3]
    image = shard.image(0)
    assert image is not None
    assert image.left == [8]


def test_finished_batches_are_the_same_after_a_recovery(make, tmp_path: Path) -> None:
    """Each batch is applied once, although members die, their batches are dealt again, and the
    server is snapshotted and killed."""
    specs = [make.spec(number, tensor=f"t{number}") for number in range(3)]

    async def life(seed: int, state: dict[str, Any]) -> None:
        generator = random.Random(seed)
        async with opened(tmp_path / "data") as server:
            if server.layout is None:
                server.members = Members(generation=1, members=frozenset("abcdef"))
                server.adopt(make.layout(*specs))
                await server.configure(make.sgd(lr=1.0))
                for spec in specs:
                    await server.initialize(
                        make.upload(torch.zeros(6), spec, sequence=0, base_version=0)
                    )
            for member in state["members"]:
                for batch in range(state["next"], state["next"] + generator.randrange(1, 6)):
                    state["next"] = batch + 1
                    state["sequences"][member] = sequence = state["sequences"].get(member, 0) + 1
                    dies, acknowledged = (
                        generator.random() < 0.3,
                        state["acknowledged"].pop(member, ()),
                    )
                    reached = generator.randrange(len(specs)) if dies else len(specs)
                    for spec in specs[:reached]:
                        gradient = torch.full((6,), float(batch))
                        await server.push(
                            make.upload(
                                gradient,
                                spec,
                                member=member,
                                sequence=sequence,
                                batch=batch,
                                finished=acknowledged,
                            )
                        )
                        acknowledged = ()
                    state["acknowledged"][member] = (batch,)
                    if generator.random() < 0.3:
                        await server.snapshots.write()
                    state["pushed"].setdefault(member, []).append(batch)
                    if dies:
                        state["dead"].append(member)
                        break

    async def deal_again(state: dict[str, Any]) -> None:
        """Pushes all batches of the dead members again, as if none had been acknowledged."""
        async with opened(tmp_path / "data") as server:
            left = sorted(batch for member in state["dead"] for batch in state["pushed"][member])
            for sequence, batch in enumerate(left, 1):
                for spec in specs:
                    await server.push(
                        make.upload(
                            torch.full((6,), float(batch)),
                            spec,
                            member="f",
                            sequence=sequence,
                            batch=batch,
                        )
                    )
            check(server.shard, state)

    def check(shard: Shard, state: dict[str, Any]) -> None:
        for spec in specs:
            image = shard.image(spec.partition_id)
            assert image is not None
            assert image.values.tolist() == [-float(sum(range(1, state["next"])))] * 6

    state: dict[str, Any] = {
        "next": 1,
        "members": list("abcde"),
        "dead": [],
        "pushed": {},
        "sequences": {},
        "acknowledged": {},
    }
    for seed in range(8):
        asyncio.run(life(seed, state))
        state["members"] = [member for member in state["members"] if member not in state["dead"]]
    assert len(state["dead"]) > 1
    asyncio.run(deal_again(state))
