"""Buckets of sparse tables are partitions: pushes are applied exactly once and journaled, and
snapshots and copies on other servers are exact to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shoal_common.errors import InvalidRequestError, LimitError
from shoal_common.optimizers.for_servers import TABLE_OPTIMIZERS
from shoal_common.tables.values import buckets_of, initial_rows
from shoal_ps_server.replication.items import PARTITION, STATE, Item
from shoal_ps_server.shard import table_rows
from shoal_ps_server.shard.partition import PartitionImage
from shoal_ps_server.shard.payload import Upload
from shoal_ps_server.shard.shard import Shard
from shoal_ps_server.storage.image import (
    Members,
    ServerState,
    dumps,
    layout_from_json,
    layout_to_json,
    state_from_json,
    state_to_json,
)
from shoal_ps_server.storage.snapshot import partition_from_bytes, partition_to_bytes

from tests.unit.ps_server.journaled import Journaled, file, opened, recovered, run, same, state_of


def pulled(shard: Shard, *ids: int, partition_id: int = 0) -> np.ndarray[Any, Any]:
    """Returns the values that a pull returns."""
    data = bytes(shard.read_rows(partition_id, np.array(ids, np.int64)).take(1 << 20))
    return np.frombuffer(data, np.float32).reshape(len(ids), -1)


def shard_with(make: Any, *specs: Any) -> Shard:
    """Returns a shard with these buckets."""
    shard = Shard(optimizer=make.sgd())
    shard.adopt(make.layout(*specs))
    return shard


def test_members_report_clocks_for_buckets_but_not_for_frozen_tensors(make) -> None:
    assert not make.shard(make.spec()).is_trained(frozenset({"weight"}))
    assert make.shard(make.spec()).is_trained(frozenset())
    assert shard_with(make, make.bucket()).is_trained(frozenset({"weight"}))
    assert not shard_with(make).is_trained(frozenset())


def test_bucket_has_initial_values_and_stores_pushed_rows(make) -> None:
    spec = make.bucket(optimizer="sgd", hyperparameters={"lr": 0.5})
    shard = shard_with(make, spec)
    begun = initial_rows(np.array([3, -9]), 4, seed=7, initializer="normal", scale=0.1)
    empty = shard.summary().stored_bytes
    assert (pulled(shard, 3, -9) == begun).all()
    assert (shard.version(0), shard.summary().stored_bytes) == (1, empty)
    outcome = shard.push(make.rows([-9, 12], [[1.0] * 4, [2.0] * 4], spec))
    assert (outcome.version, outcome.duplicate, outcome.staleness) == (2, False, 0)
    assert (pulled(shard, -9) == begun[1:] - np.float32(0.5)).all()
    assert (pulled(shard, 3) == begun[:1]).all()
    assert shard.summary().stored_bytes > empty


def test_a_push_counts_once_by_its_number_and_by_its_batch(make) -> None:
    spec = make.bucket(optimizer="sgd", hyperparameters={"lr": 1.0}, initializer="zeros", scale=0.0)
    shard = shard_with(make, spec)
    for _ in range(2):
        shard.push(make.rows([1, 2], 1.0, spec, batch=5))
    again = shard.push(make.rows([1, 2], 1.0, spec, member="b", batch=5))
    assert (again.duplicate, again.known_batch, again.version) == (True, True, 2)
    shard.push(make.rows([], 1.0, spec, sequence=2, base_version=2))
    assert (pulled(shard, 1, 2, 3)[:, 0].tolist(), shard.version(0)) == ([-1, -1, 0], 3)


def test_refused_push_leaves_capacity_and_numbers_unchanged(make) -> None:
    spec = make.bucket()
    shard = shard_with(make, spec)
    admitted = [shard.admit_push(make.rows([n], 1.0, spec, sequence=n)) for n in (1, 2)]
    for each in admitted:
        shard.refuse(each)
    assert shard.push(make.rows([1], 1.0, spec)).version == 2


@pytest.mark.parametrize(
    ("ids", "gradients", "reason", "words"),
    [
        ([3, 3], 1.0, "ROWS_INVALID", "unique ids in ascending order"),
        ([4, 3], 1.0, "ROWS_INVALID", "unique ids in ascending order"),
        ([-1, 3], 1.0, "ROWS_INVALID", "id -1: expected 0 to 99"),
        ([3, 100], 1.0, "ROWS_INVALID", "id 100: expected 0 to 99"),
        (
            [3, 5],
            [[1.0] * 4, [1.0, 1.0, float("nan"), 1.0]],
            "GRADIENT_NOT_FINITE",
            "gradients of 1 of 2 rows .* with id 5",
        ),
        ([3], float("inf"), "GRADIENT_NOT_FINITE", "with id 3"),
        (
            [3],
            1e30,
            "RESULT_NOT_FINITE",
            "would make sum of 1 of 1 rows NaN or infinite, the first with id 3",
        ),
    ],
)
def test_invalid_rows_are_refused_and_nothing_changes(make, ids, gradients, reason, words) -> None:
    spec = make.bucket(rows=100)
    shard = shard_with(make, spec)
    shard.push(make.rows([3], 1.0, spec))
    before = state_of(shard)
    with pytest.raises(InvalidRequestError, match=words) as caught:
        shard.push(make.rows(ids, gradients, spec, sequence=2))
    assert caught.value.reason == reason
    assert same(state_of(shard), before)
    assert shard.push(make.rows([3], 1.0, spec, sequence=2)).version == 3


def test_rows_of_another_bucket_are_refused(make) -> None:
    spec = make.bucket(buckets=4, number=2)
    ids = np.arange(50)
    (own, *_), (other, *_) = ids[buckets_of(ids, 4) == 2], ids[buckets_of(ids, 4) != 2]
    shard = shard_with(make, spec)
    shard.push(make.rows([own], 1.0, spec))
    with pytest.raises(InvalidRequestError, match=f"id {other} belongs to another bucket"):
        shard.push(make.rows([other], 1.0, spec, sequence=2))


def test_full_bucket_refuses_new_rows_and_accepts_old_ones(make, monkeypatch) -> None:
    spec = make.bucket()
    shard = shard_with(make, spec)
    shard.push(make.rows(range(10), 1.0, spec))
    monkeypatch.setattr(
        table_rows, "LARGEST_BUCKET_BYTES", 10 * shard._partitions[0].rows.row_bytes
    )
    shard.push(make.rows(range(10), 1.0, spec, sequence=2))
    with pytest.raises(LimitError, match="with more buckets, or with max_rows") as caught:
        shard.push(make.rows([10], 1.0, spec, sequence=3))
    assert caught.value.reason == "MEMORY_EXHAUSTED"
    assert len(shard.image(0).rows.ids) == 10


def test_new_rows_without_memory_are_refused_before_anything_is_written(make, monkeypatch) -> None:
    spec = make.bucket()
    shard = shard_with(make, spec)

    def none_left(more: int) -> None:
        raise MemoryError

    monkeypatch.setattr(shard._partitions[0].rows, "reserve", none_left)
    with pytest.raises(LimitError, match="not enough memory for 1 more rows") as caught:
        shard.admit_push(make.rows([10], 1.0, spec))
    assert caught.value.reason == "MEMORY_EXHAUSTED"
    assert shard._partitions[0].on_their_way == 0


def test_capacity_is_reserved_for_rows_in_progress(make) -> None:
    """Admitting a push reserves the memory for its rows, because a journaled change must not fail
    for lack of memory."""
    spec = make.bucket()
    shard = shard_with(make, spec)
    rows = shard._partitions[0].rows
    admitted = [
        shard.admit_push(make.rows(range(100 * n, 100 * n + 100), 1.0, spec, sequence=n))
        for n in range(1, 6)
    ]
    nbytes = rows.nbytes
    for each in admitted:
        shard.apply(each)
    assert (len(rows), rows.nbytes) == (500, nbytes)


def copied(shard: Shard, partition_id: int, spec: Any) -> PartitionImage:
    """Returns a partition as another server receives it for `spec`."""
    entry, data = partition_to_bytes(shard.image(partition_id))
    return partition_from_bytes(entry, memoryview(data), spec, None)


async def begun(server: Journaled, make: Any, *specs: Any) -> None:
    """Sets up a server with these buckets and members a and b."""
    server.members = Members(generation=1, members=frozenset("ab"))
    server.adopt(make.layout(*specs))
    await server.configure(make.sgd())


def pushes(make: Any, specs: Any, count: int) -> list[Upload]:
    """Returns pushes of two members in turn, with ids that repeat and ids that do not."""
    made = []
    generator = np.random.default_rng(0)
    for step in range(count):
        for spec in specs:
            ids = np.unique(generator.integers(0, 30, 6))
            gradients = generator.standard_normal((len(ids), 4))
            made.append(
                make.rows(
                    ids.tolist(),
                    gradients,
                    spec,
                    member="ab"[step % 2],
                    sequence=step // 2 + 1,
                    base_version=1,
                    batch=step + 1,
                )
            )
    return made


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad", "sparse_adam", "sgd"])
def test_crash_between_any_two_records_leaves_the_rows_bit_for_bit(
    make, tmp_path, optimizer
) -> None:
    data = tmp_path / "data"
    states: list[tuple[int, dict[int, Any]]] = []
    specs = [
        make.bucket(n, optimizer=optimizer, hyperparameters={"lr": 0.1}, max_age=4, max_rows=12)
        for n in (0, 4)
    ]

    async def test() -> None:
        async with opened(data) as server:
            await begun(server, make, *specs)
            states.append((file(data).stat().st_size, state_of(server.shard)))
            for upload in pushes(make, specs, 9):
                await server.push(upload)
                states.append((file(data).stat().st_size, state_of(server.shard)))

    run(test())
    whole = file(data).read_bytes()
    assert len(whole) == states[-1][0]
    for size, state in states[1:]:
        for cut, expected in (
            (size, state),
            (size - 1, None),
            (min(len(whole), size + 100), state),
        ):
            file(data).write_bytes(whole[:cut])
            found = recovered(data)
            assert expected is None or same(found, expected), cut
            assert expected is not None or not same(found, state)


def test_snapshot_plus_later_journal_give_the_rows_bit_for_bit(make, tmp_path) -> None:
    data = tmp_path / "data"
    spec = make.bucket(optimizer="sparse_adam", hyperparameters={"lr": 0.1}, max_rows=16)

    async def test() -> dict[int, Any]:
        uploads = pushes(make, [spec], 20)
        async with opened(data) as server:
            await begun(server, make, spec)
            for upload in uploads[:12]:
                await server.push(upload)
            await server.snapshots.write()
            for upload in uploads[12:16]:
                await server.push(upload)
            middle = state_of(server.shard)
        assert same(recovered(data), middle)
        async with opened(data) as server:
            assert (await server.push(uploads[15])).duplicate
            for upload in uploads[16:]:
                assert not (await server.push(upload)).duplicate
            await server.snapshots.write()
            return state_of(server.shard)

    after = run(test())
    assert same(recovered(data), after)
    never_stopped = shard_with(make, spec)
    for upload in pushes(make, [spec], 20):
        never_stopped.push(upload)
    assert same(state_of(never_stopped), after)


def test_empty_bucket_is_in_snapshots_and_copies_too(make, tmp_path) -> None:
    data = tmp_path / "data"
    specs = [
        make.bucket(number, optimizer=name, hyperparameters={})
        for number, name in enumerate(TABLE_OPTIMIZERS)
    ]

    async def test() -> dict[int, Any]:
        async with opened(data) as server:
            await begun(server, make, *specs)
            await server.push(make.rows([], 1.0, specs[0]))
            await server.snapshots.write()
            return state_of(server.shard)

    before = run(test())
    assert same(recovered(data), before)
    assert before[0].version == 2
    shard = shard_with(make, *specs)
    copies = {number: copied(shard, number, specs[number]) for number in shard.partition_ids()}
    assert same(copies, state_of(shard))


def test_snapshot_whose_rows_contradict_the_layout_is_refused(make) -> None:
    spec = make.bucket()
    shard = shard_with(make, spec)
    shard.push(make.rows([1, 2], 1.0, spec))
    assert same({0: copied(shard, 0, spec)}, state_of(shard))
    for other in (make.bucket(dim=3), make.bucket(optimizer="sparse_adam", hyperparameters={})):
        with pytest.raises(ValueError, match="do not match the layout"):
            copied(shard, 0, other)


def test_backup_receives_the_rows_and_continues_with_them(make) -> None:
    """A backup that receives a primary's layout and rows applies later pushes as the primary
    does."""
    specs = [make.bucket(n, optimizer="sparse_adam", hyperparameters={"lr": 0.1}) for n in (0, 4)]
    primary = shard_with(make, *specs)
    for upload in pushes(make, specs, 6):
        primary.push(upload)
    state = ServerState(
        job_id="job",
        server_id="one",
        layout=make.layout(*specs),
        configuration=None,
        membership=Members(),
    )
    items = [Item(kind=STATE, payload=memoryview(dumps(state_to_json(state)).encode()))]
    for number in primary.partition_ids():
        entry, data = partition_to_bytes(primary.image(number))
        items.append(Item(kind=PARTITION, fields=entry, payload=memoryview(data)))
    received = state_from_json(json.loads(bytes(items[0].payload)))
    assert received == state
    there = received.layout.partitions
    images = [
        partition_from_bytes(item.fields, item.payload, there[item.fields["partition_id"]], None)
        for item in items[1:]
    ]
    backup = Shard(optimizer=make.sgd(), restored=images)
    for shard in (primary, backup):
        for upload in pushes(make, specs, 12)[12:]:
            shard.push(upload)
    assert same(state_of(backup), state_of(primary))


def test_the_layout_with_buckets_survives_json(make) -> None:
    layout = make.layout(make.spec(1), make.bucket(0, buckets=3, number=2, max_rows=9, rows=1000))
    read = layout_from_json(layout_to_json(layout))
    assert dict(read.partitions) == dict(layout.partitions)
    assert read.partitions[0] != make.bucket(0, buckets=3, number=1)


def test_table_has_its_own_optimizer(make, tmp_path: Path) -> None:
    """A table keeps its own optimizer when the job's learning rate changes."""
    spec = make.bucket(optimizer="sgd", hyperparameters={"lr": 1.0}, initializer="zeros", scale=0.0)
    shard = shard_with(make, spec, make.spec(1))
    shard.initialize(make.upload(torch.zeros(6), make.spec(1), sequence=0, base_version=0))
    shard.push(make.rows([1], 1.0, spec))
    shard.configure(make.sgd(lr=100.0))
    shard.push(make.rows([1], 1.0, spec, sequence=2))
    assert pulled(shard, 1)[0].tolist() == [-2.0] * 4
