"""Acknowledged changes are in the journal once after a crash at any byte. A disk that refuses a
write changes nothing."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shoal_common.errors import ConfigurationError, CorruptDataError, InvalidRequestError
from shoal_common.formats import codecs
from shoal_ps_server.consistency.clocks import Clocks, Consistency, ConsistencyMode
from shoal_ps_server.settings import Fsync
from shoal_ps_server.shard.layout import PartitionSpec, Piece
from shoal_ps_server.shard.optimizer import optimizer_settings
from shoal_ps_server.shard.payload import Upload
from shoal_ps_server.storage.image import Members
from shoal_ps_server.storage.segments import Owner, Segments

from tests.unit.ps_server.journaled import (
    ADAMW,
    JOB,
    begun,
    file,
    opened,
    recovered,
    run,
    same,
    state_of,
)


@pytest.mark.parametrize("fsync", list(Fsync))
def test_acknowledged_changes_are_bitwise_present_after_a_crash(make, tmp_path, fsync) -> None:
    """Acknowledged pushes of two members and changes to the learning rate are bitwise restored
    after a crash."""

    async def test() -> None:
        async with opened(tmp_path / "data", fsync) as server:
            await begun(server, make)
            weight, bias = make.spec(0), make.spec(3, length=4, dtype="bfloat16", tensor="bias")
            for step in (1, 2, 3):
                await server.push(
                    make.upload(torch.randn(6), weight, sequence=step, base_version=step)
                )
                await server.push(
                    make.upload(
                        torch.randn(4),
                        bias,
                        member="b",
                        sequence=step,
                        base_version=step,
                        batch=step,
                    )
                )
                await server.configure(
                    optimizer_settings(
                        name="adamw", hyperparameters={**ADAMW, "lr": 0.1 / (step + 1)}
                    )
                )
            assert (await server.push(make.upload(torch.randn(6), weight, sequence=3))).duplicate
            before = state_of(server.shard)
            configuration = server.configuration
        assert same(recovered(tmp_path / "data"), before)
        async with opened(tmp_path / "data", fsync) as server:
            assert same(state_of(server.shard), before)
            assert server.configuration == configuration
            outcome = await server.push(
                make.upload(torch.randn(6), make.spec(0), sequence=4, base_version=4)
            )
            assert (outcome.version, outcome.duplicate) == (5, False)
            before = state_of(server.shard)
        assert same(recovered(tmp_path / "data"), before)

    run(test())


def test_acknowledged_factors_are_multiplied_to_the_same_bits_after_a_crash(make, tmp_path) -> None:
    """Acknowledged powersgd pushes, which are journaled as received, are bitwise restored after a
    crash, even if a piece was absent."""
    weight = PartitionSpec(
        partition_id=0,
        pieces=tuple(Piece(tensor=name, offset=0, length=640, row=16) for name in ("one", "two")),
        element=make.spec().element,
    )
    drawn = np.random.default_rng(0).standard_normal

    def push(sequence: int, absent: tuple[int, ...]) -> Upload:
        pieces = [
            (drawn((40, 3), np.float32), drawn((3, 16), np.float32)) for _ in range(2 - len(absent))
        ]
        payload = codecs.encode_powersgd(pieces)
        plain = make.upload(
            torch.zeros(640 * len(pieces)), weight, sequence=sequence, absent=absent
        ).header
        upload = Upload(
            replace(plain, codec=codecs.POWERSGD, payload_bytes=payload.nbytes, checksum=0)
        )
        upload.add(payload)
        return upload

    async def test() -> None:
        async with opened(tmp_path / "data") as server:
            server.members = Members(generation=1, members=frozenset("a"))
            server.adopt(make.layout(weight))
            await server.configure(optimizer_settings(name="adamw", hyperparameters=ADAMW))
            await server.initialize(
                make.upload(torch.zeros(weight.length), weight, sequence=0, base_version=0)
            )
            for sequence, absent in enumerate(((), (0,), (1,), ()), 1):
                assert not (await server.push(push(sequence, absent))).duplicate
            before = state_of(server.shard)
        assert same(recovered(tmp_path / "data"), before)

    run(test())


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_crash_at_any_byte_keeps_earlier_changes_and_nothing_of_the_interrupted_one(
    make, tmp_path, every: int
) -> None:
    data = tmp_path / "data"
    states: list[tuple[int, dict[int, Any]]] = []

    async def test() -> None:
        async with opened(data) as server:
            await begun(server, make)
            for step in (1, 2, 3):
                await server.push(
                    make.upload(
                        torch.randn(6),
                        make.spec(0),
                        sequence=step,
                        base_version=step,
                        batch=7 + step,
                    )
                )
                states.append((file(data).stat().st_size, state_of(server.shard)))
            # The push is a duplicate by its batch, which another member has pushed. Its sequence
            # number is used up, and must stay so after the crash.
            assert (
                await server.push(make.upload(torch.randn(6), make.spec(0), member="b", batch=10))
            ).duplicate
            states.append((file(data).stat().st_size, state_of(server.shard)))

    run(test())
    whole = file(data).read_bytes()
    assert len(whole) == states[-1][0]
    beside_ends = {size + by for size, _ in states for by in (-1, 0, 1)}
    for cut in range(len(whole)):
        if cut % every and cut not in beside_ends:
            continue
        file(data).write_bytes(whole[:cut])
        found = recovered(data)
        acknowledged = [state for size, state in states if size <= cut]
        if acknowledged:
            assert same(found, acknowledged[-1]), cut
        elif found and found[0] is not None:
            assert found[0].version == 1


def test_file_written_over_an_older_one_ends_with_its_own_records(make, tmp_path) -> None:
    """A reused journal file ends with its own last record after a crash at any byte. The complete
    records after it belong to the older file."""
    data = tmp_path / "data"
    states: list[tuple[int, dict[int, Any]]] = []

    async def test() -> bytes:
        async with opened(data) as server:
            await begun(server, make)
            for step in range(1, 8):
                await server.push(
                    make.upload(torch.randn(6), make.spec(0), sequence=step, base_version=step)
                )
            await server.snapshots.write()
            spare = (data / "journal.spare").read_bytes()
            await server.snapshots.write()  # creates its journal file from the spare
            written = data / "journal.00000003"
            assert written.stat().st_size == len(spare)
            for step in (8, 9):
                await server.push(
                    make.upload(torch.randn(6), make.spec(0), sequence=step, base_version=step)
                )
                end = (
                    max(
                        place
                        for place in range(len(spare))
                        if written.read_bytes()[place] != spare[place]
                    )
                    + 1
                )
                states.append((end, state_of(server.shard)))
        return spare

    stale = run(test())
    whole = (data / "journal.00000003").read_bytes()
    assert same(recovered(data), states[-1][1])
    for cut in range(states[0][0], states[1][0]):
        (data / "journal.00000003").write_bytes(whole[:cut] + stale[cut:])
        assert same(recovered(data), states[0][1]), cut


def test_server_continues_after_a_torn_end_and_recovers_again(make, tmp_path) -> None:
    data = tmp_path / "data"

    async def test() -> None:
        async with opened(data) as server:
            await begun(server, make)
            await server.push(make.upload(torch.randn(6), make.spec(0)))
        torn = file(data)
        torn.write_bytes(torn.read_bytes()[:-1])
        for step in (1, 2):
            async with opened(data) as server:
                assert (
                    await server.push(
                        make.upload(torch.randn(6), make.spec(0), sequence=step, base_version=step)
                    )
                ).version == step + 1
                before = state_of(server.shard)
        assert same(recovered(data), before)

    run(test())


def test_recovered_changes_are_on_disk_before_new_ones_follow(make, tmp_path, monkeypatch) -> None:
    """Recovery syncs the journal before the server continues, because the killed process may have
    written records without syncing them."""
    data = tmp_path / "data"
    synced: list[str] = []

    async def test() -> None:
        async with opened(data) as server:
            await begun(server, make)
        monkeypatch.setattr(
            "shoal_ps_server.storage.segments.sync_file", lambda path: synced.append(path.name)
        )
        async with opened(data):
            assert synced == ["journal.00000001"]

    run(test())


def test_damage_to_acknowledged_changes_prevents_the_start(make, tmp_path) -> None:
    data = tmp_path / "data"

    async def test() -> None:
        async with opened(data) as server:
            await begun(server, make)
            for step in (1, 2):
                await server.push(
                    make.upload(torch.randn(6), make.spec(0), sequence=step, base_version=step)
                )

    run(test())
    whole = file(data).read_bytes()
    last = whole.rfind(b"\x89shoalR\n")
    generator = random.Random(0)
    for place in [*generator.sample(range(last), 60), 0, last - 1]:
        file(data).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(
            CorruptDataError, match=r"journal\.00000001 is damaged.*Acknowledged updates are lost"
        ) as caught:
            recovered(data)
        assert caught.value.reason == "JOURNAL_CORRUPT"


def test_missing_journal_file_prevents_the_start(make, tmp_path) -> None:
    data = tmp_path / "data"

    async def test() -> None:
        for step in (1, 2, 3):
            async with opened(data) as server:
                if step == 1:
                    await begun(server, make)
                await server.push(
                    make.upload(torch.randn(6), make.spec(0), sequence=step, base_version=step)
                )

    run(test())
    for number in (1, 2):
        hidden = data / f"journal.{number:08d}"
        kept = hidden.read_bytes()
        hidden.unlink()
        with pytest.raises(CorruptDataError, match=f"{hidden.name} is missing"):
            recovered(data)
        hidden.write_bytes(kept)
    assert recovered(data)[0].version == 4


def test_journal_of_another_server_is_refused(make, tmp_path) -> None:
    async def test() -> None:
        async with opened(tmp_path / "data") as server:
            await begun(server, make)

    run(test())
    other = Segments(tmp_path / "data", Owner(job_id=JOB, server_id="other"))
    other.open()
    with pytest.raises(ConfigurationError, match="not to server 'other'") as caught:
        list(other.records(0))
    assert caught.value.reason == "JOURNAL_FOREIGN"


def test_snapshot_replaces_the_journal_including_concurrent_pushes(make, tmp_path) -> None:
    """A snapshot and the pushes made while it is written are restored. Pushes in the new journal
    file that a copied partition already includes are not applied twice."""
    data = tmp_path / "data"

    async def test() -> None:
        async with opened(data) as server:
            await begun(server, make)
            server.members = Members(
                generation=4, members=frozenset({"a"}), evicted={"b": 4, "c": 4}, slowest_clock=9
            )
            server.changes.members_changed()
            steps = {0: 0, 3: 0}

            async def train(partition: int, length: int, dtype: str, tensor: str) -> None:
                for _ in range(40):
                    steps[partition] += 1
                    spec = make.spec(partition, length=length, dtype=dtype, tensor=tensor)
                    step = steps[partition]
                    await server.push(
                        make.upload(torch.randn(length), spec, sequence=step, base_version=step)
                    )

            training = [
                asyncio.create_task(train(0, 6, "float32", "weight")),
                asyncio.create_task(train(3, 4, "bfloat16", "bias")),
            ]
            for _ in range(5):
                await asyncio.sleep(0.005)
                await server.snapshots.write()
            await asyncio.gather(*training)
            before = state_of(server.shard)
        assert [path.name for path in sorted(data.glob("journal.*"))] == [
            "journal.00000006",
            "journal.id",
            "journal.spare",
        ]
        assert same(recovered(data), before)
        async with opened(data) as server:
            assert server.members.generation == 4
            assert server.members.slowest_clock >= 9

    run(test())


def test_distances_between_members_survive_a_crash(make, tmp_path) -> None:
    """After a crash, members are as far apart as before, so ssp's bound holds. A member's last push
    counts only once the member reports it."""

    async def test() -> None:
        async with opened(tmp_path / "data") as server:
            await begun(server, make)
            for member, pushes in (("a", 5), ("b", 2)):
                for sequence in range(1, pushes + 1):
                    await server.push(
                        make.upload(torch.ones(6), make.spec(0), member=member, sequence=sequence)
                    )
            server.changes.clock("c", 3)
        async with opened(tmp_path / "data") as server:
            clocks = server.members.restored_clocks()
            assert {member: each.clock for member, each in clocks.members.items()} == {
                "a": 4,
                "b": 1,
                "c": 0,
            }
            for member, finished in (("a", 5), ("b", 2), ("c", 4)):
                clocks.report(member, finished)
            assert {member: each.clock for member, each in clocks.members.items()} == {
                "a": 5,
                "b": 2,
                "c": 1,
            }
            await server.snapshots.write()
        async with opened(tmp_path / "data") as server:
            assert {member: each.clock for member, each in server.members.clocks.items()} == {
                "a": 4,
                "b": 1,
                "c": 0,
            }

    run(test())


def test_open_bsp_iteration_and_resting_members_survive_a_crash(make, tmp_path) -> None:
    """After a crash, the server knows the open iteration of bsp and the members at rest. A joiner
    therefore begins after that iteration, and no member waits for one at rest."""
    bsp = Consistency(mode=ConsistencyMode.BSP)

    def check(clocks: Clocks) -> None:
        assert (clocks.opened, clocks.slowest) == (3, 2)
        assert {
            member: (each.clock, each.rests, each.takes_part)
            for member, each in clocks.members.items()
        } == {
            "a": (2, False, True),
            "b": (2, False, False),  # it has been placed again since its last push
            "c": (0, True, False),
        }
        clocks.follow(["a", "b", "c", "joiner"])
        assert clocks.members["joiner"].clock == 3

    async def test() -> None:
        async with opened(tmp_path / "data") as server:
            await begun(server, make, bsp)
            for sequence in range(1, 4):
                for member in ("a", "b")[: 1 if sequence == 3 else 2]:
                    await server.push(
                        make.upload(torch.ones(6), make.spec(0), member=member, sequence=sequence)
                    )
            server.changes.clock("b", 1, place=2)
            server.changes.clock("c", 2**63 - 1)
        async with opened(tmp_path / "data") as server:
            check(server.members.restored_clocks())
            await server.snapshots.write()
        async with opened(tmp_path / "data") as server:
            check(server.members.restored_clocks())

    run(test())


def test_push_sent_twice_at_once_is_applied_once_and_both_are_answered_once_it_is_on_disk(
    make, tmp_path
) -> None:
    async def test() -> None:
        async with opened(tmp_path / "data") as server:
            await begun(server, make)
            gradient = torch.randn(6)
            outcomes = await asyncio.gather(
                *(server.push(make.upload(gradient, make.spec(0))) for _ in range(4))
            )
            assert [each.duplicate for each in outcomes] == [False, True, True, True]
            assert [each.version for each in outcomes] == [2, 2, 2, 2]

    run(test())


def test_trial_update_waits_for_those_in_progress(make, tmp_path) -> None:
    """An update that must be tried waits for earlier updates. If it would become infinite, it is
    refused and not journaled."""
    data = tmp_path / "data"

    async def test() -> None:
        async with opened(data) as server:
            spec = make.spec(dtype="float16")
            server.members = Members(generation=1, members=frozenset("abc"))
            server.adopt(make.layout(spec))
            await server.configure(optimizer_settings(name="sgd", hyperparameters={"lr": 1.0}))
            await server.initialize(make.upload(torch.zeros(6), spec, sequence=0, base_version=0))
            pushes = [
                server.push(make.upload(torch.full((6,), 30000.0), spec, member=member))
                for member in "abc"
            ]
            outcomes = await asyncio.gather(*pushes, return_exceptions=True)
            assert [getattr(each, "version", None) or each.reason for each in outcomes] == [
                2,
                3,
                "RESULT_NOT_FINITE",
            ]
            assert make.values(server.shard).tolist() == [-60000.0] * 6
            before = state_of(server.shard)
        assert same(recovered(data), before)

    run(test())


def test_invalid_push_is_not_written(make, tmp_path) -> None:
    data = tmp_path / "data"

    async def test() -> None:
        async with opened(data) as server:
            await begun(server, make)
            size = file(data).stat().st_size
            with pytest.raises(InvalidRequestError):
                await server.changes.push(make.upload(torch.full((6,), float("nan")), make.spec(0)))
            assert file(data).stat().st_size == size
            assert (await server.push(make.upload(torch.randn(6), make.spec(0)))).version == 2

    run(test())


def test_optimizer_that_fails_halfway_leaves_no_partial_state(make, monkeypatch) -> None:
    shard = make.shard(optimizer=optimizer_settings(name="adamw", hyperparameters=ADAMW))
    real, calls = torch.zeros_like, []

    def failing(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) == 2:  # exp_avg has been allocated, exp_avg_sq has not
            raise RuntimeError("can't allocate memory")
        return real(*arguments, **options)

    with monkeypatch.context() as broken:
        broken.setattr(torch, "zeros_like", failing)
        with pytest.raises(RuntimeError):
            shard.push(make.upload(torch.ones(6)))
    assert len(calls) == 2
    other = make.shard(optimizer=optimizer_settings(name="adamw", hyperparameters=ADAMW))
    for each in (shard, other):
        assert (
            each.push(make.upload(torch.ones(6), sequence=1 if each is other else 2)).version == 2
        )
    assert torch.equal(make.values(shard), make.values(other))


def test_settings_acknowledged_before_the_shard_map_are_recovered_too(make, tmp_path) -> None:
    data = tmp_path / "data"
    adamw = optimizer_settings(name="adamw", hyperparameters=ADAMW)

    async def test() -> None:
        async with opened(data) as server:
            await server.configure(adamw)
        async with opened(data) as server:
            assert server.configuration is not None
            assert server.configuration.optimizer == adamw
            server.adopt(make.layout())
            await server.initialize(make.upload(torch.zeros(6), sequence=0, base_version=0))
            await server.push(make.upload(torch.ones(6)))
            await server.snapshots.write()
        async with opened(data) as server:
            assert server.configuration.optimizer == adamw
            assert server.shard.version(0) == 2

    run(test())


def test_forgotten_member_stays_forgotten_after_a_recovery(make, tmp_path) -> None:
    async def test() -> None:
        async with opened(tmp_path / "data") as server:
            await begun(server, make)
            for step in (1, 2, 3):
                await server.push(make.upload(torch.ones(6), make.spec(0), sequence=step))
            server.members = Members(generation=2, members=frozenset("bc"))
            server.changes.members_changed()
            server.shard.forget(["a"])
            await server.push(make.upload(torch.ones(6), make.spec(0), member="b"))
            before = state_of(server.shard)
            assert before[0].sequences == {"b": 1}
        assert same(recovered(tmp_path / "data"), before)

    run(test())


def test_damage_to_the_first_record_after_a_snapshot_is_not_a_torn_start(make, tmp_path) -> None:
    data = tmp_path / "data"

    async def test() -> None:
        async with opened(data) as server:
            await begun(server, make)
            await server.snapshots.write()

    run(test())
    named = data / "journal.00000002"
    whole = named.read_bytes()
    named.write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])
    with pytest.raises(CorruptDataError, match="a snapshot refers to it"):
        recovered(data)


def test_record_within_a_payload_is_not_a_record(make, tmp_path) -> None:
    """Recovery does not mistake bytes in a payload for a record, even if they come from another
    journal and the journal's end is torn."""
    data, other = tmp_path / "data", tmp_path / "other"
    for number, path in enumerate((data, other), start=1):
        path.mkdir()
        # a random id gives a random checksum, which may contain the bytes of an infinite value
        (path / "journal.id").write_text(f"{number:016x}\n")

    async def test(path: Path, payload: bytes) -> None:
        async with opened(path) as server:
            spec = make.spec(length=len(payload) // 4)
            server.members = Members(generation=1, members=frozenset("abc"))
            server.adopt(make.layout(spec))
            await server.configure(optimizer_settings(name="sgd", hyperparameters={"lr": 1.0}))
            await server.initialize(
                make.upload(torch.zeros(spec.length), spec, sequence=0, base_version=0)
            )
            values = torch.frombuffer(bytearray(payload), dtype=torch.float32)
            await server.push(make.upload(values, spec))

    run(test(other, bytes(4096)))
    stolen = file(other).read_bytes()
    stolen = stolen[stolen.rfind(b"\x89shoalR\n") :][:4096].ljust(8192, b"\0")
    run(test(data, stolen))
    whole = file(data).read_bytes()
    assert whole.count(b"\x89shoalR\n") == 7  # one of them is in a payload
    file(data).write_bytes(whole[:-5])
    assert recovered(data)[0].version == 1
