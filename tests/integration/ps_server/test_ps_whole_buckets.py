"""Buckets of a table are read and restored as a unit: bit for bit, once, and even if the server
stops meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from shoal_common.clients.parameter_server import ParameterServerClient
from shoal_common.errors import CorruptDataError, PermissionDeniedError, ShoalError
from shoal_common.formats.wire import CHUNK_BYTES, checksum
from shoal_common.tables.file import BucketImage, read_bucket
from shoal_protos.v1 import parameter_server_pb2 as pb

from tests.integration.ps_server.test_ps_tables import (
    ASP,
    BUCKETS,
    DIM,
    TableMember,
    declare,
    steps,
)

Make = Callable[..., Any]
FLAGS = ("--job", "job", "--server-id", "server")


def read(client: ParameterServerClient, number: int) -> bytes:
    data = bytearray()
    header = client.read_rows(
        pb.ReadRowsRequest(job_id="job", shard_map_epoch=1, partition_id=1 + number), data.extend
    )
    assert (header.partition_id, header.payload_bytes) == (1 + number, len(data))
    assert header.version == read_bucket(memoryview(data)).version
    return bytes(data)


def read_all(client: ParameterServerClient) -> list[bytes]:
    return [read(client, number) for number in range(BUCKETS)]


def restore(
    client: ParameterServerClient, number: int, data: bytes, *, restoration: int = 1, **changes: Any
) -> pb.RestoreRowsResponse:
    fields = {
        "partition_id": 1 + number,
        "payload_bytes": len(data),
        "checksum": checksum(data),
        "job_id": "job",
        "member_id": "a",
        "generation": 1,
        "shard_map_epoch": 1,
        "restoration": restoration,
    }
    pieces = (memoryview(data)[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES))
    return client.restore_rows(pb.RowsHeader(**{**fields, **changes}), pieces)


def encoded(image: BucketImage) -> bytes:
    return b"".join(image.encoded().parts)


def trained(client: ParameterServerClient) -> TableMember:
    client.configure_optimizer("job", pb.OptimizerSpec(name="sgd"), ASP)
    return TableMember(client)


@pytest.fixture
def member(cluster: Any) -> TableMember:
    declare(cluster)
    client = cluster.unregistered()
    cluster.coordinator.registrations.get(timeout=30)
    cluster.coordinator.heartbeats.get(timeout=30)
    return trained(client)


def test_restored_rows_replace_newer_ones_and_training_continues_bit_for_bit(
    member: TableMember,
) -> None:
    pushes = steps(9)
    for each in pushes[:5]:
        member.push(*each)
    then = read_all(member.client)
    for each in pushes[5:]:
        member.push(*each)
    after = read_all(member.client)
    for number in range(BUCKETS):
        answer = restore(member.client, number, then[number], restoration=7)
        assert (answer.version, answer.duplicate) == (6, False)
    assert read_all(member.client) == then
    assert {each.restoration for each in member.client.get_server().partitions} == {0, 7}
    for each in pushes[5:]:
        assert {result.version for result in member.push(*each)} <= {7, 8, 9, 10}
    assert read_all(member.client) == after


def test_restoration_is_applied_once_and_never_after_a_newer_one(member: TableMember) -> None:
    begun = read(member.client, 0)
    member.push(*steps(1)[0])
    then = read(member.client, 0)
    assert not restore(member.client, 0, then, restoration=3).duplicate
    member.push(*steps(2)[1])
    now = read(member.client, 0)
    for late in (3, 2):
        answer = restore(member.client, 0, begun, restoration=late)
        assert (answer.duplicate, answer.version) == (True, 3)
    assert read(member.client, 0) == now


def test_restoration_without_a_number_only_fills_buckets_without_pushes(
    member: TableMember,
) -> None:
    member.push(*steps(1)[0])
    then = read_all(member.client)
    assert restore(member.client, 0, then[0], restoration=0).duplicate
    empty = encoded(replace(read_bucket(memoryview(then[1])), version=1))
    assert not restore(member.client, 1, empty, restoration=5).duplicate
    assert restore(member.client, 1, then[1], restoration=0).duplicate


def test_first_rows_on_a_fresh_server_win(cluster: Any, member: TableMember) -> None:
    image = BucketImage(
        table="users",
        number=0,
        buckets=BUCKETS,
        version=9,
        rows=read_bucket(memoryview(read(member.client, 0))).rows,
    )
    assert not restore(member.client, 0, encoded(image), restoration=0).duplicate
    assert restore(member.client, 0, encoded(replace(image, version=4)), restoration=0).duplicate
    assert read_bucket(memoryview(read(member.client, 0))).version == 9


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        ({"job_id": "other"}, "NOT_FOUND", "JOB_UNKNOWN"),
        ({"partition_id": 0}, "INVALID_ARGUMENT", "ROWS_INVALID"),
        ({"partition_id": 2}, "INVALID_ARGUMENT", "ROWS_INVALID"),
        ({"partition_id": 9}, "NOT_FOUND", "PARTITION_UNKNOWN"),
        ({"restoration": -1}, "INVALID_ARGUMENT", "REQUEST_INVALID"),
        ({"member_id": ""}, "INVALID_ARGUMENT", "REQUEST_INVALID"),
        ({"member_id": "stranger"}, "FAILED_PRECONDITION", "STALE_GENERATION"),
        ({"checksum": 1}, "DATA_LOSS", "CHECKSUM_MISMATCH"),
        ({"payload_bytes": 1}, "INVALID_ARGUMENT", "PAYLOAD_SIZE_MISMATCH"),
        ({"payload_bytes": 1 << 20}, "INVALID_ARGUMENT", "PAYLOAD_TRUNCATED"),
        ({"payload_bytes": 1 << 40}, "RESOURCE_EXHAUSTED", "PAYLOAD_TOO_LARGE"),
    ],
)
def test_a_wrong_restoration_gets_its_status_and_changes_nothing(
    member: TableMember, change: Any, code: str, reason: str
) -> None:
    member.push(*steps(1)[0])
    now = read_all(member.client)
    with pytest.raises(ShoalError) as caught:
        restore(member.client, 0, now[0], **change)
    assert (caught.value.code, caught.value.reason) == (code, reason)
    assert read_all(member.client) == now
    assert not any(each.restoration for each in member.client.get_server().partitions)


def test_rows_that_cannot_belong_to_the_bucket_are_refused(member: TableMember) -> None:
    member.push(*steps(1)[0])
    image = read_bucket(memoryview(read(member.client, 0)))
    rows = image.rows
    wrong = {
        "unique ids": replace(rows, ids=rows.ids[::-1].copy()),
        "another bucket": replace(rows, ids=np.arange(len(rows.ids))),
        "NaN or infinity": replace(rows, values=np.full_like(rows.values, np.inf)),
        "rows is": replace(rows, values=rows.values[:, 1:].copy()),
        "state/sum is nothing": replace(rows, state={}),
        "state/momentum": replace(rows, state={**rows.state, "momentum": rows.values}),
    }
    for what, each in wrong.items():
        with pytest.raises(ShoalError, match=what) as caught:
            restore(member.client, 0, encoded(replace(image, rows=each)))
        assert caught.value.reason == "ROWS_INVALID"
    for data in (b"", b"\xff" * 8, encoded(image)[:-4], encoded(replace(image, version=0))):
        with pytest.raises(ShoalError, match="cannot parse the payload as a bucket") as caught:
            restore(member.client, 0, data)
        assert caught.value.reason == "ROWS_INVALID"


def test_read_only_caller_reads_buckets_but_cannot_restore_them(
    cluster: Any, tmp_path: Any
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("worker: wt\nreader: rt\n")
    declare(cluster)
    cluster.unregistered(tokens=tokens, token="st")
    worker, reader = (cluster.client(cluster.running, token=token) for token in ("wt", "rt"))
    cluster.coordinator.registrations.get(timeout=30)
    trained(worker).push(*steps(1)[0])
    then = read(reader, 0)
    assert len(read_bucket(memoryview(then)).rows.ids) > 0
    with pytest.raises(PermissionDeniedError):
        restore(reader, 0, then)
    assert not restore(worker, 0, then).duplicate


def test_member_restores_rows_only_with_its_own_key(cluster: Any) -> None:
    declare(cluster)
    cluster.coordinator.members(1, "a", "b", keys={"a": "a" * 32, "b": "b" * 32})
    cluster.unregistered()
    cluster.coordinator.registrations.get(timeout=30)
    cluster.coordinator.heartbeats.get(timeout=30)
    own, other = (cluster.client(cluster.running, member_key=name * 32) for name in ("a", "b"))
    trained(own).push(*steps(1)[0])
    then = read(own, 0)
    with pytest.raises(PermissionDeniedError) as refused:
        restore(other, 0, then)
    assert refused.value.reason == "MEMBER_KEY_WRONG"
    assert not restore(own, 0, then).duplicate


def test_only_buckets_can_be_read_as_a_whole(member: TableMember) -> None:
    for partition, reason in ((0, "ROWS_INVALID"), (9, "PARTITION_UNKNOWN")):
        with pytest.raises(ShoalError) as caught:
            member.client.read_rows(
                pb.ReadRowsRequest(job_id="job", shard_map_epoch=1, partition_id=partition),
                lambda data: None,
            )
        assert caught.value.reason == reason


def test_stream_damaged_in_transit_is_detected(
    member: TableMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal_common.clients import parameter_server

    decode = parameter_server.decode_rows_chunk

    def damaged(data: bytes, malformed: type[ShoalError]) -> Any:
        header, payload = decode(data, malformed)
        return header, memoryview(bytes(payload.nbytes))

    monkeypatch.setattr(parameter_server, "decode_rows_chunk", damaged)
    with pytest.raises(CorruptDataError) as caught:
        read(member.client, 0)
    assert caught.value.reason == "CHECKSUM_MISMATCH"


@pytest.mark.parametrize(
    "snapshot_after",
    [
        2,
        pytest.param(5, marks=pytest.mark.slow),
        *(pytest.param(each, marks=pytest.mark.matrix) for each in (None, 7)),
    ],
)
def test_killed_server_returns_with_restored_rows_and_pushes_before_and_after(
    cluster: Any, start: Make, tmp_path: Any, snapshot_after: int | None
) -> None:
    """Versions go back with the restoration. The journal nevertheless replays correctly, whenever
    the snapshot was taken."""
    declare(cluster)
    flags = ("--coordinator", cluster.address, *FLAGS, "--data-dir", str(tmp_path / "data"))
    process = start(*flags)
    member = trained(process.client())
    cluster.coordinator.registrations.get(timeout=30)
    member.pull(np.arange(1))  # makes the member known to the server
    then: list[bytes] = []
    for number, each in enumerate(steps(8)):
        if number == 2:
            then = read_all(member.client)
        if number == 6:
            for bucket in range(BUCKETS):
                restore(member.client, bucket, then[bucket], restoration=1 << 40)
        member.push(*each)
        if number == snapshot_after:
            member.client.snapshot("job")
    before = read_all(member.client)
    assert {read_bucket(memoryview(data)).version for data in before} == {5}
    process.end(signal.SIGKILL)
    member.client.close()
    again = TableMember(start(*flags).client())
    again.sequence = 8
    again.pull(np.arange(1))
    assert read_all(again.client) == before
    assert {each.restoration for each in again.client.get_server().partitions} == {0, 1 << 40}
    assert all(
        restore(again.client, bucket, then[bucket], restoration=1 << 40).duplicate
        for bucket in range(BUCKETS)
    )
    assert all(each.duplicate for each in again.push(*steps(8)[7], again=True))
    again.client.close()


@pytest.mark.parametrize(
    "failpoint",
    [
        "journal.before_write",
        pytest.param("journal.durable", marks=pytest.mark.slow),
        pytest.param("journal.effect_made", marks=pytest.mark.matrix),
    ],
)
def test_server_killed_during_a_restoration_has_all_of_it_or_nothing(
    cluster: Any, start: Make, tmp_path: Any, failpoint: str
) -> None:
    declare(cluster)
    flags = ("--coordinator", cluster.address, *FLAGS, "--data-dir", str(tmp_path / "data"))
    process = start(*flags)
    member = trained(process.client())
    cluster.coordinator.registrations.get(timeout=30)
    member.pull(np.arange(1))
    begun = read(member.client, 0)
    member.push(*steps(1)[0])
    then = read(member.client, 0)
    process.end(signal.SIGTERM)
    member.client.close()
    struck = start(*flags, SHOAL_FAILPOINTS=f"{failpoint}@1=kill")
    client = struck.client()
    with pytest.raises(ShoalError):
        restore(client, 0, begun)
    client.close()
    assert struck.wait() == -signal.SIGKILL
    again = start(*flags).client()
    assert read(again, 0) == (then if failpoint == "journal.before_write" else begun)
    restore(again, 0, begun)
    assert read(again, 0) == begun
    again.close()
    assert read_bucket(memoryview(then)).rows.values.shape[1] == DIM
