"""Every malformed request is answered with its status and reason, and leaves the server
unchanged."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from shoal_common.bulk.transport import Transport
from shoal_common.errors import ShoalError
from shoal_common.formats.wire import encode_push_chunk
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_ps_server.replication.items import FORMAT_VERSION, STATE, Item
from shoal_ps_server.storage.image import Members, members_to_json

SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServer"]
STREAMED = {"Initialize", "Push", "RestoreRows", "Follow", "TakePartitions"}
EXPECTED_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DATA_LOSS,
}
ASP = pb.Consistency(mode=pb.Consistency.MODE_ASP)
SGD = pb.OptimizerSpec(name="sgd")


over_each_transport = pytest.mark.parametrize(
    "transport", [Transport.GRPC, Transport.TCP, Transport.MEMORY]
)


@pytest.fixture
def trained(cluster):
    """A server with values, its only member, and a raw channel to it."""
    client = cluster.server(members={1: ["a"]})
    member = cluster.trainable(client)
    member.pull()
    with grpc.insecure_channel(cluster.running.address) as channel:
        yield client, member, channel


def send(channel: grpc.Channel, method: str, data: bytes | list[bytes]) -> grpc.RpcError | None:
    """Makes a call and returns its error, or None."""
    path = f"/{SERVICE.full_name}/{method}"
    try:
        if method in STREAMED:
            channel.stream_unary(path)(iter(data), timeout=30)
        elif method in ("Pull", "ReadRows"):
            list(channel.unary_stream(path)(data, timeout=30))
        else:
            channel.unary_unary(path)(data, timeout=30)
    except grpc.RpcError as error:
        return error
    return None


def reason(error: grpc.RpcError) -> str:
    info = error_details_pb2.ErrorInfo()
    rpc_status.from_call(error).details[0].Unpack(info)
    assert info.domain == "shoal"
    return info.reason


def chunk(header: pb.PushHeader | None, payload: bytes = b"") -> bytes:
    return encode_push_chunk((header, memoryview(payload)))


@pytest.mark.parametrize("method", [method.name for method in SERVICE.methods])
def test_bytes_that_are_not_a_message_are_an_invalid_argument(trained, method) -> None:
    _, _, channel = trained
    error = send(channel, method, [b"\xff\x01"] if method in STREAMED else b"\xff\x01")
    assert (error.code(), reason(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "MESSAGE_MALFORMED")


@pytest.mark.parametrize(
    "method", sorted({method.name for method in SERVICE.methods} - {"GetServer"})
)
def test_request_for_another_job_is_not_found(trained, method) -> None:
    _, member, channel = trained
    if method == "Follow":
        error = send(
            channel,
            method,
            [pb.FollowRequest(begin=pb.FollowBegin(job_id="other")).SerializeToString()],
        )
    elif method == "TakePartitions":
        offer = {
            "move": 1,
            "epoch": 1,
            "partitions": [],
            "configuration": None,
            "members": members_to_json(Members()),
            "batches": [],
        }
        fields = {"format": FORMAT_VERSION, "job_id": "other", **offer}
        error = send(channel, method, list(Item(kind=STATE, fields=fields).encoded()))
    elif method == "RestoreRows":
        error = send(
            channel,
            method,
            [pb.RowsChunk(header=pb.RowsHeader(job_id="other")).SerializeToString()],
        )
    elif method in STREAMED:
        error = send(channel, method, [chunk(member.header(0, job_id="other"))])
    else:
        request = next(
            each for each in SERVICE.methods if each.name == method
        ).input_type._concrete_class(job_id="other")
        error = send(channel, method, request.SerializeToString())
    assert (error.code(), reason(error)) == (grpc.StatusCode.NOT_FOUND, "JOB_UNKNOWN")


@over_each_transport
@pytest.mark.parametrize(
    ("call", "code", "why"),
    [
        (
            lambda c, m: c.configure_optimizer("job", pb.OptimizerSpec(name="lion"), ASP),
            "INVALID_ARGUMENT",
            "OPTIMIZER_INVALID",
        ),
        (
            lambda c, m: c.configure_optimizer("job", SGD, pb.Consistency()),
            "INVALID_ARGUMENT",
            "CONSISTENCY_INVALID",
        ),
        (
            lambda c, m: c.configure_optimizer("job", SGD, pb.Consistency(mode=2, bound=-1)),
            "INVALID_ARGUMENT",
            "CONSISTENCY_INVALID",
        ),
        (
            lambda c, m: c.configure_optimizer("job", SGD, pb.Consistency(mode=1, bound=1)),
            "INVALID_ARGUMENT",
            "CONSISTENCY_INVALID",
        ),
        (
            lambda c, m: c.configure_optimizer("job", SGD, ASP),
            "FAILED_PRECONDITION",
            "OPTIMIZER_CONFLICT",
        ),
        (
            lambda c, m: c.configure_optimizer(
                "job", pb.OptimizerSpec(name="sgd", groups=[pb.ParameterGroup(tensors=["x"])]), ASP
            ),
            "INVALID_ARGUMENT",
            "OPTIMIZER_INVALID",
        ),
        (
            lambda c, m: c.set_hyperparameters("job", revision=0, hyperparameters={"lr": 1}),
            "INVALID_ARGUMENT",
            "REQUEST_INVALID",
        ),
        (
            lambda c, m: c.set_hyperparameters("job", revision=1, hyperparameters={"lr": -1}),
            "INVALID_ARGUMENT",
            "OPTIMIZER_INVALID",
        ),
        (
            lambda c, m: c.set_hyperparameters("job", revision=1, hyperparameters={"rate": 1}),
            "INVALID_ARGUMENT",
            "OPTIMIZER_INVALID",
        ),
        (lambda c, m: c.advance_clock("job", "a", clock=-1), "INVALID_ARGUMENT", "REQUEST_INVALID"),
        (lambda c, m: c.advance_clock("job", "", clock=1), "INVALID_ARGUMENT", "REQUEST_INVALID"),
        (lambda c, m: c.snapshot("job"), "FAILED_PRECONDITION", "SNAPSHOTS_OFF"),
        (lambda c, m: m.pull(clock=-1), "INVALID_ARGUMENT", "REQUEST_INVALID"),
        (lambda c, m: m.pull(generation=-1), "INVALID_ARGUMENT", "REQUEST_INVALID"),
        (lambda c, m: m.pull(wait_ms=600_001), "INVALID_ARGUMENT", "REQUEST_INVALID"),
        (lambda c, m: m.pull(wait_ms=-1), "INVALID_ARGUMENT", "REQUEST_INVALID"),
        (
            lambda c, m: m.pull(partitions=[pb.PartitionPull(partition_id=1)] * 2),
            "INVALID_ARGUMENT",
            "REQUEST_INVALID",
        ),
        (
            lambda c, m: m.pull(partitions=[pb.PartitionPull(newer_than=-1)]),
            "INVALID_ARGUMENT",
            "REQUEST_INVALID",
        ),
        (
            lambda c, m: m.pull(partitions=[pb.PartitionPull(partition_id=3)]),
            "NOT_FOUND",
            "PARTITION_UNKNOWN",
        ),
        (lambda c, m: m.push(1.0, sequence=5), "FAILED_PRECONDITION", "SEQUENCE_GAP"),
        (lambda c, m: m.push(1.0, base_version=7), "FAILED_PRECONDITION", "BASE_VERSION_AHEAD"),
        (lambda c, m: m.push(float("nan")), "INVALID_ARGUMENT", "GRADIENT_NOT_FINITE"),
        (lambda c, m: m.push(float("inf")), "INVALID_ARGUMENT", "GRADIENT_NOT_FINITE"),
        (
            lambda c, m: c.push([(m.header(0, checksum=1), memoryview(bytes(1024)))]),
            "DATA_LOSS",
            "CHECKSUM_MISMATCH",
        ),
        (
            lambda c, m: c.push([(m.header(0, payload_bytes=17 << 20), memoryview(b"1"))]),
            "RESOURCE_EXHAUSTED",
            "PAYLOAD_TOO_LARGE",
        ),
        (
            lambda c, m: c.push([(m.header(0), memoryview(bytes(1028)))]),
            "INVALID_ARGUMENT",
            "PAYLOAD_SIZE_MISMATCH",
        ),
        (
            lambda c, m: c.push([(m.header(0), memoryview(bytes(1020)))]),
            "INVALID_ARGUMENT",
            "PAYLOAD_TRUNCATED",
        ),
    ],
)
def test_a_wrong_request_gets_its_status_and_changes_nothing(trained, call, code, why) -> None:
    client, member, _ = trained
    before = client.get_server(member_id="a")
    with pytest.raises(ShoalError) as caught:
        call(client, member)
    assert (caught.value.code, caught.value.reason) == (code, why)
    assert client.get_server(member_id="a") == before
    assert {each.version for each in member.push(1.0)} == {2}


@over_each_transport
def test_refusal_keeps_the_partitions_before_it_and_stops_those_after(trained) -> None:
    client, member, _ = trained
    good, bad = memoryview(np.ones(256, np.float32)), memoryview(np.full(256, np.nan, np.float32))
    with pytest.raises(ShoalError):
        client.push(
            [(member.header(0), good), (member.header(1), bad), (member.header(2), good[:88])]
        )
    assert [each.version for each in client.get_server().partitions] == [2, 1, 1]
    assert [each.duplicate for each in member.push(1.0)] == [True, False, False]


@over_each_transport
def test_two_members_in_one_stream_are_refused(cluster) -> None:
    client = cluster.server()
    member = cluster.trainable(client)
    payload = memoryview(np.ones(256, np.float32))
    with pytest.raises(
        ShoalError, match=r"a stream belongs to one member|for which OpenData opened"
    ):
        client.push([(member.header(0), payload), (member.header(1, member_id="b"), payload)])


def test_message_longer_than_any_chunk_is_resource_exhausted(trained) -> None:
    _, member, channel = trained
    error = send(channel, "Push", [chunk(member.header(0)), bytes(5 << 20)])
    assert error.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
    too_long = send(channel, "Push", [bytes(17 << 20)])
    assert too_long.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


HEADERS = st.builds(
    lambda changes: changes,
    st.dictionaries(
        st.sampled_from(
            [
                "partition_id",
                "generation",
                "shard_map_epoch",
                "sequence",
                "base_version",
                "clock",
                "dtype",
                "codec",
                "length",
            ]
        ),
        st.one_of(st.integers(-1, 3), st.integers(-(2**31), 2**31 - 1)),
        max_size=3,
    ),
)


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    method=st.sampled_from([method.name for method in SERVICE.methods]),
    data=st.binary(max_size=60),
    changes=HEADERS,
    payload=st.one_of(st.binary(max_size=1100), st.binary(min_size=1024, max_size=1024)),
)
@example(method="Push", data=b"", changes={}, payload=b"")
@example(method="Push", data=b"", changes={}, payload=bytes(1024))
@example(method="Initialize", data=b"", changes={"generation": 2}, payload=b"")
def test_arbitrary_messages_get_only_expected_answers(
    trained, method, data, changes, payload
) -> None:
    """Sends random bytes to every RPC, and almost valid pushes. The server answers, or fails with
    one of the project's statuses. Only complete pushes change values."""
    client, member, channel = trained
    header = member.header(0)
    for name, value in changes.items():
        setattr(header, name, value)
    stream = [chunk(header, payload), data]
    error = send(channel, method, stream if method in STREAMED else data)
    if error is not None:
        # For a newer generation, the server waits until the coordinator announces it.
        expected = set(EXPECTED_CODES)
        if header.generation > member.header(0).generation:
            expected.add(grpc.StatusCode.UNAVAILABLE)
        assert error.code() in expected
        assert reason(error)
    partitions = client.get_server(member_id="a").partitions
    # All pushes are from this member, so a partition's version counts them. Its values stay finite
    # whatever was sent.
    assert [each.version for each in partitions] == [1 + each.sequence for each in partitions]
    reader = {
        "member_id": "",
        "partitions": [pb.PartitionPull(partition_id=each.partition_id) for each in partitions],
    }
    assert all(
        np.isfinite(np.frombuffer(values, np.float32)).all()
        for values in member.pull(**reader).values()
    )
