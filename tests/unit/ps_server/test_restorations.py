"""Restoring a bucket's rows is a change like a push: it is ordered with the pushes, journaled,
applied once, and refused while the bucket moves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from shoal_common.errors import UnavailableError
from shoal_common.tables.file import BucketImage
from shoal_ps_server.shard.layout import PartitionSpec
from shoal_ps_server.shard.shard import Restoration, Shard

from tests.unit.ps_server.journaled import Journaled, file, opened, recovered, run, same, state_of
from tests.unit.ps_server.test_table_partitions import begun, pushes, shard_with

OPTIMIZER = {
    "optimizer": "sparse_adam",
    "hyperparameters": {"lr": 0.1},
    "max_rows": 16,
    "max_age": 5,
}


def restoration(shard: Shard, spec: PartitionSpec, number: int) -> Restoration:
    """Returns a restoration of the bucket's present content."""
    image = shard.bucket_image(spec)
    assert image.rows is not None
    assert spec.bucket is not None
    whole = BucketImage(
        table="users", number=spec.bucket.number, buckets=1, version=image.version, rows=image.rows
    )
    payload = memoryview(b"".join(whole.encoded().parts))
    return Restoration(
        spec=spec,
        number=number,
        version=image.version,
        rows=shard.prepared(spec, image.rows),
        payload=payload,
    )


async def restore(server: Journaled, wanted: Restoration) -> Any:
    return await asyncio.shield(await server.changes.restore(wanted))


def test_crash_between_any_two_records_leaves_the_restored_rows_and_later_changes(
    make: Any, tmp_path: Any
) -> None:
    data = tmp_path / "data"
    specs = [make.bucket(number, **OPTIMIZER) for number in (0, 4)]
    states: list[tuple[int, dict[int, Any]]] = []

    async def test() -> None:
        uploads = pushes(make, specs, 14)
        async with opened(data) as server:
            await begun(server, make, *specs)
            for upload in uploads[:10]:
                await server.push(upload)
            then = [restoration(server.shard, spec, 3) for spec in specs]
            for upload in uploads[10:16]:
                await server.push(upload)
            for each in then:
                assert not (await restore(server, each)).duplicate
                states.append((file(data).stat().st_size, state_of(server.shard)))
            for upload in uploads[16:]:
                assert not (await server.push(upload)).duplicate
                states.append((file(data).stat().st_size, state_of(server.shard)))
            assert (await restore(server, restoration(server.shard, specs[0], 3))).duplicate

    run(test())
    whole = file(data).read_bytes()
    for size, state in states:
        file(data).write_bytes(whole[:size])
        assert same(recovered(data), state)


@pytest.mark.parametrize("snapshot_at", range(0, 24, 3))
def test_snapshot_at_any_time_plus_the_later_journal_gives_the_rows(
    make: Any, tmp_path: Any, snapshot_at: int
) -> None:
    """A snapshot at any time and the journal after it restore the rows, although a restoration
    resets version numbers, so that they repeat."""
    data = tmp_path / "data"
    spec = make.bucket(**OPTIMIZER)

    async def test() -> dict[int, Any]:
        async with opened(data) as server:
            await begun(server, make, spec)
            wanted = []
            for step, upload in enumerate(pushes(make, [spec], 24)):
                if step == 4:
                    wanted = [restoration(server.shard, spec, number) for number in (1, 2)]
                if step in (10, 18):
                    await restore(server, wanted.pop(0))
                if step == snapshot_at:
                    await server.snapshots.write()
                await server.push(upload)
            return state_of(server.shard)

    after = run(test())
    assert after[0].version == 5 + 24 - 18
    assert same(recovered(data), after)


def test_concurrent_pushes_are_ordered_before_or_after_a_restoration(
    make: Any, tmp_path: Any
) -> None:
    """Pushes and restorations at the same time do not wait for each other. The server orders them
    and journals that order."""
    data = tmp_path / "data"
    spec = make.bucket(**OPTIMIZER)

    async def test() -> dict[int, Any]:
        uploads = pushes(make, [spec], 60)
        async with opened(data) as server:
            await begun(server, make, spec)
            for upload in uploads[:8]:
                await server.push(upload)
            wanted = [restoration(server.shard, spec, number) for number in range(1, 6)]

            async def of(member: str) -> None:
                for upload in uploads[8:]:
                    if upload.header.member_id == member:
                        await server.push(upload)

            async def restorations() -> None:
                for each in wanted:
                    await restore(server, each)
                    for _ in range(3):
                        await asyncio.sleep(0)

            await asyncio.gather(of("a"), of("b"), restorations())
            assert server.shard.restoration(0) == 5
            return state_of(server.shard)

    after = run(test())
    assert same(recovered(data), after)


def test_first_rows_do_not_replace_a_push_in_progress(make: Any, tmp_path: Any) -> None:
    spec = make.bucket(**OPTIMIZER)

    async def test() -> None:
        async with opened(tmp_path / "data") as server:
            await begun(server, make, spec)
            wanted = restoration(server.shard, spec, 0)
            pushed = await server.changes.push(pushes(make, [spec], 1)[0])
            assert not pushed.done()
            assert (await restore(server, wanted)).duplicate
            assert (await pushed).version == server.shard.version(0) == 2

    run(test())


def test_moving_bucket_is_not_restored(make: Any) -> None:
    spec = make.bucket(**OPTIMIZER)
    shard = shard_with(make, spec)
    wanted = restoration(shard, spec, 1)
    shard.freeze([0])
    with pytest.raises(UnavailableError) as caught:
        shard.admit_restoration(wanted)
    assert caught.value.reason == "PARTITION_MOVING"
    shard.thaw([0])
    assert shard.admit_restoration(wanted)


def test_unwritable_restoration_is_not_applied_and_pushes_continue(make: Any) -> None:
    spec = make.bucket(**OPTIMIZER)
    shard = shard_with(make, spec)
    wanted = restoration(shard, spec, 1)
    assert shard.admit_restoration(wanted)
    (upload,) = pushes(make, [spec], 1)
    assert shard.needs_trial(upload)  # it needs a trial, so it waits
    shard.refuse_restoration(wanted)
    assert not shard.needs_trial(upload)
    assert shard.push(upload).version == 2
    assert shard.restoration(0) == 0
