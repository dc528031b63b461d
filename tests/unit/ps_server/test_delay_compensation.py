"""Delay compensation follows the paper, changes nothing without delay, and gives the same bits
after a crash."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from contextlib import aclosing, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from shoal_common.errors import InvalidRequestError, UnavailableError
from shoal_common.formats import codecs
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_ps_server.consistency.clocks import Clocks
from shoal_ps_server.consistency.fence import Fence
from shoal_ps_server.consistency.membership import Membership
from shoal_ps_server.service.pulls import Pulls
from shoal_ps_server.service.requests import Pull, Wanted
from shoal_ps_server.shard.optimizer import ParameterGroup, optimizer_settings
from shoal_ps_server.shard.payload import Upload, UploadHeader, bytes_of
from shoal_ps_server.shard.shard import Shard
from shoal_ps_server.storage.changes import Changes
from shoal_ps_server.storage.directory import DataDirectory
from shoal_ps_server.storage.image import Members
from shoal_ps_server.storage.segments import Owner, Segments

from tests.unit.ps_server.journaled import JOB, SERVER, opened, recovered, run, same, state_of

STRENGTH = 0.5


def settings(name: str = "sgd", **hyperparameters: float) -> Any:
    return optimizer_settings(
        name=name, hyperparameters={"lr": 0.25, **hyperparameters}, delay_compensation=STRENGTH
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gradient_of_older_values_is_compensated_for_their_movement(make, dtype) -> None:
    spec = make.packed(0, ("a", 2), ("b", 3), dtype=str(dtype).removeprefix("torch."))
    start = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=dtype)
    shard = make.shard(spec, optimizer=settings(), values=start)
    shard.note_pull(0, "a")
    shard.note_pull(0, "b")
    first, second = (
        torch.tensor([4.0, 2.0, -2.0, 1.0, 8.0], dtype=dtype),
        torch.tensor([2.0, 0.5, -4.0], dtype=dtype),
    )
    shard.push(make.upload(first, spec, member="a"))
    now = start - 0.25 * first
    torch.testing.assert_close(make.values(shard), now)
    shard.push(make.upload(second, spec, member="b", absent=[0]))
    then = now.clone()
    now[2:] -= 0.25 * (second + STRENGTH * second * second * (then[2:] - start[2:]))
    tolerance = 1e-6 if dtype.itemsize > 2 else 1e-2
    torch.testing.assert_close(make.values(shard), now, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "rowwise_adagrad"])
def test_push_without_delay_is_applied_bit_for_bit(make, name) -> None:
    plain = make.shard(
        optimizer=optimizer_settings(name=name, hyperparameters={"lr": 0.25}),
        values=torch.arange(6.0),
    )
    shard = make.shard(optimizer=settings(name), values=torch.arange(6.0))
    for sequence in range(1, 5):
        gradient = torch.randn(6)
        shard.note_pull(0, "a")
        for one in (plain, shard):
            assert (
                one.push(make.upload(gradient, sequence=sequence, base_version=sequence)).staleness
                == 0
            )
    assert torch.equal(make.values(shard), make.values(plain))


def test_push_with_an_unknown_base_is_applied_uncompensated(make) -> None:
    """A push is applied without compensation if its member never pulled under its own id, or if the
    push names another version than the last one that the member pulled."""
    shard = make.shard(optimizer=settings())
    shard.note_pull(0, "b")
    shard.push(make.upload(torch.ones(6), member="a", sequence=1))
    shard.push(make.upload(torch.ones(6), member="a", sequence=2))
    assert make.values(shard).tolist() == [-0.5] * 6
    shard.push(make.upload(torch.ones(6), member="b", base_version=2))
    assert make.values(shard).tolist() == [-0.75] * 6
    shard.push(make.upload(torch.ones(6), member="b", base_version=1, sequence=2))
    assert make.values(shard).tolist() == [-0.75 - 0.25 * (1 + STRENGTH * -0.75)] * 6


def test_copies_are_shared_counted_and_dropped(make) -> None:
    shard = make.shard(optimizer=settings())
    for member in "abc":
        shard.note_pull(0, member)
    assert shard.summary().stored_bytes == 24  # none are stored of the current version
    shard.push(make.upload(torch.ones(6), member="a"))
    assert shard.summary().stored_bytes == 48  # one copy for all three members
    shard.note_pull(0, "a")
    shard.push(make.upload(torch.ones(6), member="d"))
    assert shard.summary().stored_bytes == 72
    shard.note_pull(0, "a")
    assert shard.summary().stored_bytes == 48
    shard.keep_bases_of({"a", "c"})
    assert shard.summary().stored_bytes == 48
    shard.keep_bases_of({"a"})
    assert shard.summary().stored_bytes == 24


def test_nothing_is_kept_when_compensation_is_off(make) -> None:
    shard = make.shard()
    shard.note_pull(0, "a")
    shard.push(make.upload(torch.ones(6), member="b"))
    image = shard.image(0)
    assert not image.pulled
    assert not image.base_values


def test_compressed_gradients_are_compensated_after_decoding(make) -> None:
    spec = make.spec()
    shard = make.shard(spec, optimizer=settings())
    for member in "ab":
        shard.note_pull(0, member)
    shard.push(make.upload(torch.ones(6), member="a"))
    data = bytes(bytes_of(torch.full((6,), 3.0, dtype=torch.bfloat16)))
    header = UploadHeader(
        spec=spec,
        member_id="b",
        generation=1,
        sequence=1,
        base_version=1,
        clock=1,
        codec=pb.CODEC_BFLOAT16,
        payload_bytes=len(data),
        checksum=0,
    )
    upload = Upload(header)
    upload.add(memoryview(data))
    shard.push(upload)
    assert make.values(shard).tolist() == [-0.25 - 0.25 * (3 + STRENGTH * 9 * -0.25)] * 6


def test_overflowing_compensation_is_applied_uncompensated(make) -> None:
    shard = make.shard(optimizer=settings())
    for member in "ab":
        shard.note_pull(0, member)
    shard.push(make.upload(torch.full((6,), 1e15), member="a"))
    shard.push(make.upload(torch.full((6,), 1e15), member="b"))
    torch.testing.assert_close(make.values(shard), torch.full((6,), -0.5e15))


def test_maximize_and_negative_compensation_are_refused() -> None:
    for wrong in (
        {"hyperparameters": {"maximize": 1.0}, "delay_compensation": 0.1},
        {
            "groups": [ParameterGroup(tensors=frozenset({"a"}), hyperparameters={"maximize": 1.0})],
            "delay_compensation": 0.1,
        },
        {"delay_compensation": -0.1},
        {"delay_compensation": float("inf")},
    ):
        with pytest.raises(InvalidRequestError, match="delay_compensation=") as caught:
            optimizer_settings(name="sgd", **{"hyperparameters": {}, **wrong})
        assert caught.value.reason == "OPTIMIZER_INVALID"
    with pytest.raises(InvalidRequestError, match="negate the loss"):
        settings().changed({"maximize": 1.0}, [])


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_crash_between_any_two_records_leaves_bitwise_the_same_values(
    make, tmp_path, seed, monkeypatch
) -> None:
    """Recovery after any record gives the same bits, for members that push and pull in random
    order, with snapshots, disk failures, a schedule and a restart."""
    data = tmp_path / "data"
    generator = random.Random(seed)
    spec = make.packed(0, ("a", 1), ("b", 3), ("c", 2))
    states: dict[int, Any] = {}
    failing = False
    write = os.pwritev

    def pwritev(*arguments: Any) -> int:
        if failing and generator.random() < 0.1:
            raise OSError(28, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", pwritev)
    compensated = 0

    async def train(server: Any, member: str, sequences: dict[str, int]) -> None:
        nonlocal compensated
        base = 1
        for _ in range(30):
            if generator.random() < 0.7:
                server.shard.note_pull(0, member)
                base = server.shard.version(0)
            await asyncio.sleep(generator.choice((0, 0, 0.001)))
            absent = generator.choice(((), (), (1,)))
            sequence = sequences.get(member, 0) + 1
            upload = make.upload(
                torch.randn(spec.length_without(absent)),
                spec,
                member=member,
                sequence=sequence,
                base_version=base,
                absent=absent,
            )
            try:
                outcome = await server.push(upload)
            # the disk failed; the push is sent again, or another one instead
            except UnavailableError:
                continue
            sequences[member] = sequence
            compensated += outcome.staleness > 0

    async def life(*, fails: bool) -> None:
        nonlocal failing
        async with opened(data) as server:
            if server.layout is None:
                server.members = Members(generation=1, members=frozenset("abc"))
                server.adopt(make.layout(spec))
                await server.configure(settings("adamw"))
                await server.initialize(
                    make.upload(torch.randn(6), spec, sequence=0, base_version=0)
                )
            apply = server.shard.apply

            def noted(admitted: Any) -> Any:
                outcome = apply(admitted)
                states[outcome.version] = state_of(server.shard)
                return outcome

            monkeypatch.setattr(server.shard, "apply", noted)
            states[server.shard.version(0)] = state_of(server.shard)
            failing = fails
            training = [
                asyncio.create_task(train(server, member, dict(server.shard.image(0).sequences)))
                for member in "abc"
            ]
            for step in range(4):
                await asyncio.sleep(0.01)
                failing = False
                with suppress(UnavailableError):  # an earlier write failed
                    if step == 1:
                        await server.snapshots.write()
                    else:
                        await server.configure(
                            server.configuration.optimizer.changed({"lr": 0.1 / (step + 1)}, [])
                        )
                failing = fails
            await asyncio.gather(*training)
            failing = False
            assert not server.failures
            assert not server.shard._partitions[0].bases._due
            last = state_of(server.shard)
        assert same(recovered(data), last)

    for fails in (True, True, False):
        run(life(fails=fails))
    assert compensated > 20

    segments = Segments(data, Owner(job_id=JOB, server_id=SERVER))
    segments.open()
    number = segments.numbers()[-1]
    whole = segments.path(number).read_bytes()
    seen = set()
    place = whole.find(b"\x89shoalR\n", 1)
    while place >= 0:
        cut = tmp_path / "cut"
        shutil.copytree(data, cut)
        (cut / segments.path(number).name).write_bytes(whole[:place])
        with DataDirectory(cut) as directory:
            found = state_of(directory.recover(job_id=JOB, server_id=SERVER).shard)
        assert same(found, states[found[0].version])
        seen.add(found[0].version)
        shutil.rmtree(cut)
        place = whole.find(b"\x89shoalR\n", place + 1)
    assert len(seen) > 10


def test_members_are_compensated_after_a_restart_for_pulls_known_to_the_snapshot(
    make, tmp_path
) -> None:
    async def test() -> None:
        async with opened(tmp_path / "data") as server:
            server.members = Members(generation=1, members=frozenset("abc"))
            server.adopt(make.layout())
            await server.configure(settings())
            await server.initialize(make.upload(torch.zeros(6), sequence=0, base_version=0))
            for member in "ab":
                server.shard.note_pull(0, member)
            await server.push(make.upload(torch.ones(6), member="a"))
            await server.snapshots.write()
            server.shard.note_pull(0, "c")
        async with opened(tmp_path / "data") as server:
            await server.push(make.upload(torch.ones(6), member="b"))
            before = -0.25 - 0.25 * (1 + STRENGTH * -0.25)
            assert make.values(server.shard).tolist() == [before] * 6
            # the journal does not know of this pull
            await server.push(make.upload(torch.ones(6), member="c", base_version=2))
            assert make.values(server.shard).tolist() == [before - 0.25] * 6
            server.shard.keep_bases_of(())
            assert server.shard.summary().stored_bytes == 24

    run(test())


def test_gradient_from_before_a_move_is_not_compensated_but_the_next_is(
    make,
) -> None:
    giver = make.shard(make.spec(0), values=torch.zeros(6), optimizer=settings())
    for member in "ab":
        giver.note_pull(0, member)
    giver.push(make.upload(torch.ones(6), make.spec(0), member="a"))
    giver.freeze({0})
    receiver = Shard(optimizer=settings())
    receiver.put(giver.frozen_image(0).copy())
    outcome = receiver.push(make.upload(torch.ones(6), make.spec(0), member="b"))
    assert (outcome.version, outcome.staleness) == (3, 1)
    assert make.values(receiver).tolist() == [-0.5] * 6
    for member in "ab":
        receiver.note_pull(0, member)
    receiver.push(make.upload(torch.ones(6), make.spec(0), member="a", sequence=2, base_version=3))
    receiver.push(make.upload(torch.ones(6), make.spec(0), member="b", sequence=2, base_version=3))
    assert make.values(receiver).tolist() == [-0.75 - 0.25 * (1 + STRENGTH * -0.25)] * 6


def test_nothing_is_kept_for_evicted_members_after_a_crash(make, tmp_path) -> None:
    async def test() -> None:
        async with opened(tmp_path / "data") as server:
            server.members = Members(generation=1, members=frozenset("ab"))
            server.adopt(make.layout())
            await server.configure(settings())
            await server.initialize(make.upload(torch.zeros(6), sequence=0, base_version=0))
            server.shard.note_pull(0, "b")
            await server.push(make.upload(torch.ones(6)))
            await server.snapshots.write()
            server.members = Members(generation=2, members=frozenset("a"), evicted={"b": 2})
            server.changes.members_changed()
            await server.push(make.upload(torch.ones(6), sequence=2))

    run(test())
    (image,) = recovered(tmp_path / "data").values()
    assert (image.version, dict(image.pulled), dict(image.base_values)) == (3, {}, {})


def test_pull_that_outlives_its_member_keeps_nothing(make) -> None:
    specs = (make.spec(0), make.spec(1))
    shard = make.shard(*specs, optimizer=settings())
    membership = Membership(fence=Fence(), clocks=Clocks())
    membership.learn(1, "ab")
    changes = Changes(shard=shard, layout=lambda: None, members=Members)
    pulls = Pulls(
        shard=shard,
        membership=membership,
        quiet=changes.quiet,
        waited=lambda _: None,
        answered=lambda *_: None,
    )
    pull = Pull(
        member_id="a",
        generation=1,
        partitions=tuple(Wanted(spec=spec, newer_than=0) for spec in specs),
        clock=0,
        wait=timedelta(0),
        checksums=False,
        codec=codecs.RAW,
    )

    async def test() -> None:
        async with aclosing(pulls.serve(pull)) as chunks:
            await anext(chunks)
            membership.learn(2, "b")
            shard.keep_bases_of(membership.fence.members)
            assert len([chunk async for chunk in chunks]) == 1

    run(test())
    assert [dict(shard.image(number).pulled) for number in (0, 1)] == [{}, {}]


def test_an_update_that_compensation_would_make_infinite_is_refused_and_changes_nothing(
    make,
) -> None:
    spec = make.spec(dtype="float16")
    shard = make.shard(spec, optimizer=settings(lr=2.0))
    for member in "ab":
        shard.note_pull(0, member)
    shard.push(make.upload(torch.full((6,), 100.0), spec, member="a"))
    with pytest.raises(
        InvalidRequestError, match="the update would make 6 of 6 values NaN or infinite"
    ):
        shard.push(make.upload(torch.full((6,), 20.0), spec, member="b"))
    assert make.values(shard).tolist() == [-200.0] * 6
    shard.push(make.upload(torch.full((6,), 2.0), spec, member="b"))
    assert make.values(shard).tolist() == [-200.0 - 2 * (2 + STRENGTH * 4 * -200)] * 6
