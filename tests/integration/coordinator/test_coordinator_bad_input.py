"""Malformed requests to every method: each gets the right status and a reason, and never INTERNAL,
UNKNOWN or no answer."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
import hypothesis.strategies as st
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import HealthCheck, given, settings
from shoal_coordinator.service.methods import SERVICE
from shoal_protos.v1 import coordinator_pb2 as pb

from tests.integration.coordinator.harness import Coordinator

METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["Coordinator"].methods}
JOB = "bad-input"
FUZZED = "fuzzed"

GRANTED_OR_REFUSED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}

Outcome = tuple[grpc.StatusCode, str, str]
"""Status, reason, message."""


@pytest.fixture(scope="module")
def channel(shared_coordinator: Coordinator) -> Iterator[grpc.Channel]:
    with (
        shared_coordinator.client() as client,
        grpc.insecure_channel(shared_coordinator.ports["grpc"]) as channel,
    ):
        for job_id in (JOB, FUZZED):
            client.create_job(
                pb.JobSpec(job_id=job_id, min_workers=2, max_workers=3, parameter_servers=1)
            )
        yield channel


def outcome_of(channel: grpc.Channel, method: str, *requests: bytes) -> Outcome:
    descriptor = METHODS[method]
    ways = (descriptor.client_streaming, descriptor.server_streaming)
    kind = "_".join("stream" if streaming else "unary" for streaming in ways)
    call: Any = getattr(channel, kind)(f"/{SERVICE}/{method}", bytes, bytes)
    try:
        answer = call(iter(requests) if descriptor.client_streaming else requests[0], timeout=60)
        if descriptor.server_streaming:
            list(answer)
    except grpc.RpcError as error:
        return explained(error)
    return grpc.StatusCode.OK, "", ""


def explained(error: Any) -> Outcome:
    details = rpc_status.from_call(error)
    assert details is not None, f"{error.code()} without details: {error.details()}"
    info = error_details_pb2.ErrorInfo()
    assert details.details[0].Unpack(info)
    assert info.domain == "shoal"
    return error.code(), info.reason, details.message


# ---------------------------------------------------------------------------------- random messages

SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(1, 9)
    | st.integers(0, 1)
    | st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(1, 9)
    | st.integers(0, 1)
    | st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats() | st.just(math.nan),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 9),
}
TEXTS = {
    "job_id": st.sampled_from([FUZZED] * 6 + ["unknown", "", "../x"]),
    "member_id": st.sampled_from(["m1"] * 6 + ["m2", "", "a b"]),
    "server_id": st.sampled_from(["s1"] * 6 + ["s2", ""]),
    "host": st.sampled_from(["h1"] * 6 + ["", "h 1"]),
    "launcher_id": st.sampled_from(["l"] * 6 + ["", "x" * 200]),
    "dtype": st.sampled_from(["float32"] * 6 + ["bfloat16", "int8", ""]),
    "address": st.sampled_from(["127.0.0.1:7000"] * 6 + ["", "nowhere", "h:0"]),
    "after_event_id": st.sampled_from(["", "0", "5-1", "x", "9" * 30]),
}


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor) -> Any:
    message = message_factory.GetMessageClass(descriptor)()
    chosen = {draw(st.sampled_from(list(oneof.fields))).name for oneof in descriptor.oneofs}
    for field in descriptor.fields:
        if draw(st.integers(0, 9)) == 0 or (
            field.containing_oneof is not None and field.name not in chosen
        ):
            continue
        if field.name == "follow":
            continue  # An endless stream is not a malformed request.
        count = draw(st.integers(0, 3)) if field.is_repeated else 1
        for _ in range(count):
            fill(draw, message, field)
    return message


def fill(draw: st.DrawFn, message: Any, field: FieldDescriptor) -> None:
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        value = draw(messages(field.message_type))
        target = getattr(message, field.name)
        if field.message_type.GetOptions().map_entry:
            target[value.key] = value.value
            return
        (target.add() if field.is_repeated else target).CopyFrom(value)
        return
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        known = TEXTS.get("address" if field.name.endswith("address") else field.name)
        value = draw(known if known is not None else st.text(max_size=8) | st.just("x" * 1500))
    else:
        value = draw(SCALARS[field.cpp_type])
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


# StopJob is last, because it refuses all later requests for the job.
@pytest.mark.parametrize("method", sorted(METHODS, key=lambda name: name == "StopJob"))
def test_every_request_is_granted_or_refused_with_a_reason(
    channel: grpc.Channel, method: str
) -> None:
    descriptor = METHODS[method]

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        count = data.draw(st.integers(0, 4)) if descriptor.client_streaming else 1
        requests = [
            data.draw(messages(descriptor.input_type)).SerializeToString() for _ in range(count)
        ]
        if descriptor.client_streaming and data.draw(st.integers(0, 3)):
            requests.insert(0, introduction(method))
        status, reason, message = outcome_of(channel, method, *requests)
        if reason == "NO_SERVERS":
            assert status is grpc.StatusCode.UNAVAILABLE
            return
        assert status in GRANTED_OR_REFUSED, (status, reason, message)
        assert status is grpc.StatusCode.OK or (reason and message)

    check()


@pytest.mark.parametrize("method", [name for name in METHODS if name != "ListJobs"])
def test_bytes_that_are_not_a_message_are_refused(channel: grpc.Channel, method: str) -> None:
    assert outcome_of(channel, method, b"\xff\xff\xff")[:2] == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "MESSAGE_MALFORMED",
    )


def introduction(method: str) -> bytes:
    """Returns a valid first message of a session, so that the server looks at the messages after
    it."""
    name = f"m-{uuid.uuid4().hex}"
    if method == "JoinSession":
        return pb.MemberMessage(
            join=pb.Join(job_id=FUZZED, member_id=name, host="h", pid=1)
        ).SerializeToString()
    register = pb.RegisterServer(job_id=FUZZED, server_id="s1", address="h:1", host="h", pid=1)
    return pb.ServerMessage(register=register).SerializeToString()


# ------------------------------------------------------------------------------ one field at a time

GOOD_SPEC = {"job_id": "fresh", "min_workers": 1, "max_workers": 2}
GOOD_JOIN = {"job_id": JOB, "member_id": "m", "host": "h", "pid": 1}
GOOD_LEASE = {"job_id": JOB, "member_id": "m", "loader": "l", "batches_in_epoch": 4, "want": 1}
GOOD_SERVER = {"job_id": JOB, "server_id": "s", "address": "h:1", "host": "h", "pid": 1}
GOOD_TENSOR = {"name": "w", "shape": [2], "dtype": "float32"}
GOOD_TABLE = pb.TableSpec(buckets=4, initializer="zeros", optimizer="sgd")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("job_id", ""),
        ("job_id", "-x"),
        ("job_id", "x" * 65),
        ("job_id", "a/b"),
        ("min_workers", 0),
        ("min_workers", 3),
        ("max_workers", 10_001),
        ("parameter_servers", -1),
        ("parameter_servers", 1001),
        ("max_parameter_servers", -1),
        ("max_parameter_servers", 1001),
        ("join_grace_ms", 600_001),
        ("lease_ms", 499),
        ("stall_timeout_ms", 999),
    ],
)
def test_a_specification_is_checked_field_by_field(
    channel: grpc.Channel, field: str, value: object
) -> None:
    request = pb.CreateJobRequest(spec=pb.JobSpec(**{**GOOD_SPEC, field: value}))
    status, reason, message = outcome_of(channel, "CreateJob", request.SerializeToString())
    assert (status, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_INVALID")
    named = "max_workers" if (field, value) == ("min_workers", 3) else field
    assert message.startswith(f"{named}=")
    assert "expected" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("member_id", ""),
        ("member_id", "a b"),
        ("host", ""),
        ("pid", 0),
        ("local_index", -1),
        ("donor_address", "x"),
        ("donor_key", "A" * 32),
        ("metrics_address", "h:0"),
        ("last_generation", -1),
        ("works_in", -1),
    ],
)
def test_a_join_is_checked_field_by_field(channel: grpc.Channel, field: str, value: object) -> None:
    join = pb.MemberMessage(join=pb.Join(**{**GOOD_JOIN, field: value}))
    status, reason, message = outcome_of(channel, "JoinSession", join.SerializeToString())
    assert (status, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_INVALID")
    assert message.startswith(
        f"join.{field} has 32 characters" if field == "donor_key" else f"join.{field}="
    )


@pytest.mark.parametrize(
    "second",
    [
        pb.MemberMessage(),
        pb.MemberMessage(join=pb.Join(**GOOD_JOIN)),
        pb.MemberMessage(heartbeat=pb.Heartbeat(generation=-1)),
        pb.MemberMessage(heartbeat=pb.Heartbeat(progress=pb.Progress(sequence=-1))),
        pb.MemberMessage(heartbeat=pb.Heartbeat(generation=9)),
        pb.MemberMessage(collective_failure=pb.CollectiveFailure(generation=0)),
        pb.MemberMessage(collective_failure=pb.CollectiveFailure(generation=1, suspects=[-1])),
        pb.MemberMessage(collective_failure=pb.CollectiveFailure(generation=1, detail="x" * 1025)),
        pb.MemberMessage(leave=pb.Leave()),
        pb.MemberMessage(leave=pb.Leave(reason=pb.Leave.REASON_DRAINED, detail="x" * 1025)),
    ],
)
def test_later_messages_of_a_session_are_checked_too(
    channel: grpc.Channel, second: pb.MemberMessage
) -> None:
    name = f"m{abs(hash(second.SerializeToString()))}"
    join = pb.MemberMessage(join=pb.Join(**{**GOOD_JOIN, "member_id": name}))
    status, _, _ = outcome_of(
        channel, "JoinSession", join.SerializeToString(), second.SerializeToString()
    )
    assert status is grpc.StatusCode.INVALID_ARGUMENT


def test_session_must_begin_with_an_introduction(channel: grpc.Channel) -> None:
    ready = pb.MemberMessage(ready=pb.Ready()).SerializeToString()
    heartbeat = pb.ServerMessage(heartbeat=pb.ServerHeartbeat()).SerializeToString()
    for method, first in (("JoinSession", ready), ("ServerSession", heartbeat)):
        for requests in ([first], [b""], []):
            status, reason, message = outcome_of(channel, method, *requests)
            assert (status, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_INVALID")
            assert "first" in message


@pytest.mark.parametrize(
    ("method", "request_", "status", "reason"),
    [
        ("GetJob", pb.GetJobRequest(job_id="nope"), "NOT_FOUND", "JOB_UNKNOWN"),
        ("WatchEvents", pb.WatchEventsRequest(job_id="nope"), "NOT_FOUND", "JOB_UNKNOWN"),
        (
            "WatchEvents",
            pb.WatchEventsRequest(job_id=JOB, after_event_id="x"),
            "INVALID_ARGUMENT",
            "REQUEST_INVALID",
        ),
        (
            "CreateJob",
            pb.CreateJobRequest(spec=pb.JobSpec(**{**GOOD_SPEC, "job_id": JOB})),
            "FAILED_PRECONDITION",
            "JOB_CONFLICT",
        ),
        ("DrainMember", pb.DrainMemberRequest(job_id=JOB), "INVALID_ARGUMENT", "REQUEST_INVALID"),
        ("DrainMember", pb.DrainMemberRequest(job_id=JOB, rank=0), "NOT_FOUND", "MEMBER_UNKNOWN"),
        (
            "DrainMember",
            pb.DrainMemberRequest(job_id=JOB, member_id="nobody"),
            "NOT_FOUND",
            "MEMBER_UNKNOWN",
        ),
        ("DrainServer", pb.DrainServerRequest(job_id=JOB), "INVALID_ARGUMENT", "REQUEST_INVALID"),
        (
            "DrainServer",
            pb.DrainServerRequest(job_id=JOB, server_id="nobody"),
            "NOT_FOUND",
            "SERVER_UNKNOWN",
        ),
        (
            "ReportExit",
            pb.ReportExitRequest(job_id=JOB, member_id="m", exit_code=256),
            "INVALID_ARGUMENT",
            "REQUEST_INVALID",
        ),
        (
            "ReportMachine",
            pb.ReportMachineRequest(job_id=JOB, host="h", condition=pb.MACHINE_CONDITION_EXCLUDED),
            "INVALID_ARGUMENT",
            "REQUEST_INVALID",
        ),
        ("StopJob", pb.StopJobRequest(job_id="nope"), "NOT_FOUND", "JOB_UNKNOWN"),
        ("LeaseBatches", pb.LeaseBatchesRequest(**GOOD_LEASE), "NOT_FOUND", "MEMBER_UNKNOWN"),
        (
            "LeaseBatches",
            pb.LeaseBatchesRequest(**{**GOOD_LEASE, "want": 1025}),
            "INVALID_ARGUMENT",
            "REQUEST_INVALID",
        ),
        (
            "LeaseBatches",
            pb.LeaseBatchesRequest(**{**GOOD_LEASE, "finished": [4]}),
            "INVALID_ARGUMENT",
            "REQUEST_INVALID",
        ),
        (
            "DeclareTensors",
            pb.DeclareTensorsRequest(job_id=JOB),
            "INVALID_ARGUMENT",
            "REQUEST_INVALID",
        ),
        (
            "DeclareTensors",
            pb.DeclareTensorsRequest(
                job_id=JOB, tensors=[pb.TensorSpec(**{**GOOD_TENSOR, "dtype": "int8"})]
            ),
            "INVALID_ARGUMENT",
            "REQUEST_INVALID",
        ),
        (
            "DeclareTensors",
            pb.DeclareTensorsRequest(
                job_id=JOB, tensors=[pb.TensorSpec(**{**GOOD_TENSOR, "shape": [-1]})]
            ),
            "INVALID_ARGUMENT",
            "REQUEST_INVALID",
        ),
        (
            "DeclareTensors",
            pb.DeclareTensorsRequest(job_id=JOB, tensors=[pb.TensorSpec(**GOOD_TENSOR)] * 2),
            "INVALID_ARGUMENT",
            "REQUEST_INVALID",
        ),
        (
            "DeclareTensors",
            pb.DeclareTensorsRequest(
                job_id=JOB, tensors=[pb.TensorSpec(**{**GOOD_TENSOR, "shape": [1 << 62]})]
            ),
            "RESOURCE_EXHAUSTED",
            "TENSORS_LIMIT",
        ),
        (
            "DeclareTensors",
            pb.DeclareTensorsRequest(
                job_id=JOB,
                tensors=[
                    pb.TensorSpec(name="t", shape=[0, 8], dtype="float32", table=pb.TableSpec())
                ],
            ),
            "INVALID_ARGUMENT",
            "REQUEST_INVALID",
        ),
        (
            "DeclareTensors",
            pb.DeclareTensorsRequest(
                job_id=JOB,
                tensors=[pb.TensorSpec(name="t", shape=[8], dtype="float32", table=GOOD_TABLE)],
            ),
            "INVALID_ARGUMENT",
            "REQUEST_INVALID",
        ),
        (
            "DeclareTensors",
            pb.DeclareTensorsRequest(
                job_id=JOB,
                tensors=[pb.TensorSpec(name="t", shape=[0, 8], dtype="float64", table=GOOD_TABLE)],
            ),
            "INVALID_ARGUMENT",
            "REQUEST_INVALID",
        ),
        ("GetRanks", pb.GetRanksRequest(job_id="nope", generation=1), "NOT_FOUND", "JOB_UNKNOWN"),
        (
            "GetRanks",
            pb.GetRanksRequest(job_id=JOB, generation=0),
            "INVALID_ARGUMENT",
            "REQUEST_INVALID",
        ),
        (
            "GetRanks",
            pb.GetRanksRequest(job_id=JOB, generation=1),
            "FAILED_PRECONDITION",
            "STALE_GENERATION",
        ),
        (
            "GetShardMap",
            pb.GetShardMapRequest(job_id=JOB),
            "FAILED_PRECONDITION",
            "TENSORS_UNDECLARED",
        ),
    ],
)
def test_refusals_have_the_status_and_reason_that_the_proto_names(
    channel: grpc.Channel, method: str, request_: Any, status: str, reason: str
) -> None:
    assert outcome_of(channel, method, request_.SerializeToString())[:2] == (
        grpc.StatusCode[status],
        reason,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("server_id", ""), ("address", ""), ("address", "x"), ("host", ""), ("pid", 0)],
)
def test_a_registration_is_checked_field_by_field(
    channel: grpc.Channel, field: str, value: object
) -> None:
    register = pb.ServerMessage(register=pb.RegisterServer(**{**GOOD_SERVER, field: value}))
    status, reason, message = outcome_of(channel, "ServerSession", register.SerializeToString())
    assert (status, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_INVALID")
    assert message.startswith(f"register.{field}=")


def test_a_server_for_a_job_without_servers_is_refused(channel: grpc.Channel) -> None:
    spec = pb.JobSpec(**{**GOOD_SPEC, "job_id": "no-servers"})
    outcome_of(channel, "CreateJob", pb.CreateJobRequest(spec=spec).SerializeToString())
    register = pb.ServerMessage(
        register=pb.RegisterServer(**{**GOOD_SERVER, "job_id": "no-servers"})
    )
    assert outcome_of(channel, "ServerSession", register.SerializeToString())[:2] == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "JOB_WITHOUT_SERVERS",
    )
