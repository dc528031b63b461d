"""The parameter server client against a scripted server that uses the project's codec, and one that
uses plain protobuf."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import grpc
import numpy as np
import pytest
from shoal_common.clients import ParameterServerClient
from shoal_common.errors import (
    CorruptDataError,
    DeadlineError,
    StaleGenerationError,
    UnavailableError,
)
from shoal_common.formats import wire
from shoal_common.security.authentication import ANY_ROLE
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_protos.v1 import parameter_server_pb2_grpc

SERVICE = "shoal.v1.ParameterServer"
ROLES = {
    f"/{SERVICE}/{m.name}": ANY_ROLE
    for m in pb.DESCRIPTOR.services_by_name["ParameterServer"].methods
}


class StoringServer(parameter_server_pb2_grpc.ParameterServerServicer):
    """Stores what is pushed and returns it. Uses only the generated classes, which shows that any
    client or server can."""

    def __init__(self) -> None:
        self.partitions: dict[int, bytes] = {}
        self.chunks = 0
        self.spoil: str | None = None

    async def Push(self, request_iterator, context):
        current = -1
        async for chunk in request_iterator:
            self.chunks += 1
            if chunk.HasField("header"):
                current = chunk.header.partition_id
                if chunk.header.generation == 1:
                    raise StaleGenerationError("generation 1 is over")
                self.partitions[current] = b""
            self.partitions[current] += chunk.payload
        return pb.PushResponse(
            results=[
                pb.PartitionResult(partition_id=number, version=2) for number in self.partitions
            ]
        )

    Initialize = Push

    async def Pull(self, request, context):
        if request.wait_ms:
            await asyncio.Event().wait()
        for wanted in request.partitions:
            payload = self.partitions[wanted.partition_id]
            header = pb.PullHeader(
                partition_id=wanted.partition_id,
                version=3,
                payload_bytes=len(payload),
                checksum=wire.checksum(payload),
            )
            if self.spoil == "bytes":
                payload = bytes([payload[0] ^ 1]) + payload[1:]
            if self.spoil == "end":
                payload = payload[:-1]
            for number, piece in enumerate(wire.chunks(memoryview(payload), 1 << 20)):
                yield pb.PullChunk(header=None if number else header, payload=bytes(piece))

    async def SetHyperparameters(self, request, context):
        return pb.SetHyperparametersResponse(
            applied=request.hyperparameters["lr"] == 0.5 and request.revision == 4
        )

    async def ConfigureOptimizer(self, request, context):
        return pb.ConfigureOptimizerResponse(
            configured=request.optimizer.name == "sgd" and request.consistency.bound == 2
        )

    async def AdvanceClock(self, request, context):
        return pb.AdvanceClockResponse(slowest_clock=request.clock - 1)

    async def Snapshot(self, request, context):
        return pb.SnapshotResponse(path=f"/snapshots/{request.job_id}")

    async def GetServer(self, request, context):
        return pb.GetServerResponse(server_id="ps-0")


@pytest.fixture
def storing_server():
    return StoringServer()


@pytest.fixture
def client(serve, storing_server):
    def register(server: grpc.aio.Server) -> None:
        parameter_server_pb2_grpc.add_ParameterServerServicer_to_server(storing_server, server)

    running = serve(register=register, service_name=SERVICE, allowed_roles=ROLES)
    with ParameterServerClient(running.settings(attempts=1)) as connected:
        yield connected


def partition(number: int, length: int, generation: int = 2) -> tuple[pb.PushHeader, memoryview]:
    values = np.arange(length, dtype="<f4") + number
    return pb.PushHeader(
        partition_id=number, generation=generation, payload_bytes=values.nbytes
    ), memoryview(values)


def pull_request(*numbers: int, **more) -> pb.PullRequest:
    return pb.PullRequest(
        job_id="j", partitions=[pb.PartitionPull(partition_id=number) for number in numbers], **more
    )


@pytest.mark.parametrize("upload", ["push", "initialize"])
def test_pushed_values_are_pulled_into_the_callers_own_arrays(client, storing_server, upload):
    lengths = {0: 700_000, 1: 0, 2: 3}
    results = getattr(client, upload)(
        partition(number, length) for number, length in lengths.items()
    )
    assert [(result.partition_id, result.version) for result in results] == [(0, 2), (1, 2), (2, 2)]
    # 2.8 MB are three chunks of at most 1 MiB; an empty partition is one chunk
    assert storing_server.chunks == 5
    targets = {number: np.zeros(length, "<f4") for number, length in lengths.items()}
    headers = client.pull(
        pull_request(0, 1, 2), lambda header: memoryview(targets[header.partition_id])
    )
    assert [header.version for header in headers] == [3, 3, 3]
    for number, length in lengths.items():
        assert np.array_equal(targets[number], np.arange(length, dtype="<f4") + number)


def test_unwanted_partitions_are_only_reported(client):
    client.push([partition(0, 4)])
    assert client.pull(pull_request(0), lambda _: None)[0].partition_id == 0


@pytest.mark.parametrize(
    ("spoil", "reason"), [("bytes", "CHECKSUM_MISMATCH"), ("end", "PAYLOAD_TRUNCATED")]
)
def test_a_damaged_or_truncated_partition_is_corrupt(client, storing_server, spoil, reason):
    client.push([partition(0, 10)])
    storing_server.spoil = spoil
    with pytest.raises(CorruptDataError) as raised:
        client.pull(pull_request(0), lambda header: memoryview(bytearray(header.payload_bytes)))
    assert raised.value.reason == reason


def test_refusal_in_the_middle_of_a_push_is_raised(client):
    big = (partition(number, 1 << 20, generation=2 - (number == 1)) for number in range(50))
    with pytest.raises(StaleGenerationError, match="generation 1 is over"):
        client.push(big)


def test_callers_own_error_while_pushing_is_raised_unchanged(client):
    def failing():
        yield partition(0, 4)
        raise ZeroDivisionError("in the caller's generator")

    with pytest.raises(ZeroDivisionError, match="in the caller's generator"):
        client.push(failing())
    with pytest.raises(ValueError, match="C-contiguous"):
        client.push([(pb.PushHeader(partition_id=0), memoryview(np.zeros((4, 4))[:, ::2]))])


def test_an_error_in_the_callers_choice_of_buffer_ends_the_pull(client):
    client.push([partition(0, 1 << 20)])
    with pytest.raises(KeyError):
        client.pull(pull_request(0), lambda header: {}[header.partition_id])


def test_pull_that_waits_too_long_hits_its_deadline(client):
    with pytest.raises(DeadlineError, match="Pull at 127"):
        client.pull(
            pull_request(0, wait_ms=60_000), lambda _: None, deadline=timedelta(milliseconds=100)
        )


def test_the_small_calls_carry_their_arguments(client):
    consistency = pb.Consistency(mode=pb.Consistency.MODE_SSP, bound=2)
    assert client.configure_optimizer("j", pb.OptimizerSpec(name="sgd"), consistency).configured
    assert client.set_hyperparameters("j", revision=4, hyperparameters={"lr": 0.5}).applied
    assert client.advance_clock("j", "m", clock=8).slowest_clock == 7
    assert client.snapshot("j").path == "/snapshots/j"
    assert client.get_server().server_id == "ps-0"


def test_closed_client_refuses_streams_too(client):
    client.close()
    for call in (
        lambda: client.push([partition(0, 4)]),
        lambda: client.pull(pull_request(0), lambda _: None),
    ):
        with pytest.raises(UnavailableError) as raised:
            call()
        assert raised.value.reason == "CLIENT_CLOSED"


def test_answer_that_is_not_a_pull_chunk_is_corrupt(serve):
    async def garbage(request, context):
        yield b"\x0a\xff"

    def register(server: grpc.aio.Server) -> None:
        handler = grpc.unary_stream_rpc_method_handler(garbage, pb.PullRequest.FromString, None)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(SERVICE, {"Pull": handler})]
        )

    running = serve(register=register, service_name=SERVICE, allowed_roles=ROLES)
    with (
        ParameterServerClient(running.settings()) as client,
        pytest.raises(CorruptDataError) as raised,
    ):
        client.pull(pull_request(0), lambda _: None)
    assert raised.value.reason == "MESSAGE_MALFORMED"


def test_our_codec_as_a_servers_deserializer_names_malformed_chunks(serve):
    async def push(request_iterator, context):
        total = 0
        async for _, payload in request_iterator:
            total += payload.nbytes
        return pb.PushResponse(results=[pb.PartitionResult(version=total)])

    def register(server: grpc.aio.Server) -> None:
        handler = grpc.stream_unary_rpc_method_handler(
            push, wire.decode_push_chunk, pb.PushResponse.SerializeToString
        )
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(SERVICE, {"Push": handler})]
        )

    running = serve(register=register, service_name=SERVICE, allowed_roles=ROLES)
    with ParameterServerClient(running.settings()) as client:
        assert client.push([partition(0, 10)])[0].version == 40
    with grpc.insecure_channel(running.address) as channel, pytest.raises(grpc.RpcError) as raised:
        channel.stream_unary(f"/{SERVICE}/Push")(iter([b"\x12\xff"]), timeout=20)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
