"""A client of the bulk channel with a scripted server: how refusals and deadlines end an upload."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any

import grpc
import pytest
from shoal_common.bulk.area import SharedArea
from shoal_common.bulk.frames import DATA_BYTES, HEAD_BYTES, Frame, Kind, head, parse_head
from shoal_common.bulk.transport import Transport
from shoal_common.clients.bulk import BulkChannel, OpenedConnection
from shoal_common.clients.parameter_server import SERVICE, ParameterServerClient
from shoal_common.errors import DeadlineError, InvalidRequestError, LimitError
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.rpc.status import error_message, to_status
from shoal_protos.v1 import parameter_server_pb2 as pb

REFUSAL = InvalidRequestError("not this one", reason="GRADIENT_NOT_FINITE")
PAYLOAD = memoryview(bytes(2 * DATA_BYTES))


class Server:
    """The server's end of a connection."""

    def __init__(self, connected: socket.socket, area: SharedArea | None) -> None:
        connected.settimeout(30)
        self._socket = connected
        self._area = area

    def frame(self) -> Frame:
        """Reads the next frame including its message or payload."""
        frame = parse_head(self._exactly(HEAD_BYTES))
        if frame.kind is Kind.DATA and self._area is not None:
            self._area.next_filled(frame.length)
            self._socket.sendall(head(Kind.FREE))
        else:
            self._exactly(frame.length)
        return frame

    def until(self, kind: Kind) -> list[Kind]:
        """Reads up to a frame of `kind` and returns the kinds of the frames before it."""
        found: list[Kind] = []
        while (frame := self.frame()).kind is not kind:
            found.append(frame.kind)
        return found

    def send(self, kind: Kind, message: bytes = b"") -> None:
        self._socket.sendall(head(kind, len(message)) + message)

    def close(self) -> None:
        self._socket.close()
        if self._area is not None:
            self._area.close()

    def _exactly(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            more = self._socket.recv(nbytes - len(data))
            assert more, "the client closed the connection"
            data += more
        return data


def pair(transport: Transport) -> tuple[OpenedConnection, Server]:
    """Returns a connection that is ready and the server's end of it."""
    one, other = socket.socketpair()
    connection, area = OpenedConnection(one, "there:1", "a"), None
    if transport is Transport.MEMORY:
        area, descriptor = SharedArea.make()
        connection._area = SharedArea.received(descriptor, os.fstat(descriptor).st_size)
    return connection, Server(other, area)


@pytest.mark.parametrize("transport", [Transport.TCP, Transport.MEMORY])
def test_refused_upload_stops_and_the_connection_serves_the_next_one(
    transport: Transport,
) -> None:
    connection, server = pair(transport)
    refused, header = threading.Event(), pb.PushHeader(payload_bytes=PAYLOAD.nbytes)

    def partitions() -> Iterator[tuple[pb.PushHeader, memoryview]]:
        yield header, PAYLOAD
        assert refused.wait(30)
        for _ in range(100):
            yield header, PAYLOAD

    def serve() -> list[Kind]:
        assert server.until(Kind.DATA) == [Kind.PUSH, Kind.PARTITION]
        server.send(Kind.ERROR, error_message(REFUSAL))
        refused.set()
        wasted = server.until(Kind.END)
        server.until(Kind.END)
        server.send(
            Kind.RESULT,
            pb.PushResponse(results=[pb.PartitionResult(version=7)]).SerializeToString(),
        )
        return wasted

    with closing(connection), closing(server), ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve)
        with pytest.raises(InvalidRequestError) as caught:
            connection.upload(Kind.PUSH, partitions(), time.monotonic() + 30)
        assert caught.value.reason == REFUSAL.reason
        assert connection.is_usable
        (result,) = connection.upload(Kind.PUSH, [(header, PAYLOAD)], time.monotonic() + 30)
        assert result.version == 7
        assert serving.result(30).count(Kind.DATA) <= 1  # frames that were already on the way


def test_upload_refused_by_a_disconnecting_server_is_refused() -> None:
    connection, server = pair(Transport.TCP)

    def partitions() -> Iterator[tuple[pb.PushHeader, memoryview]]:
        yield pb.PushHeader(), PAYLOAD[:10]
        server.send(Kind.ERROR, error_message(REFUSAL))
        server.close()
        yield pb.PushHeader(), PAYLOAD[:10]

    with closing(connection):
        with pytest.raises(InvalidRequestError) as caught:
            connection.upload(Kind.PUSH, partitions(), time.monotonic() + 30)
        assert caught.value.reason == REFUSAL.reason
        assert not connection.is_usable


def test_connecting_to_a_silent_server_is_bounded_by_the_callers_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        opened = pb.OpenDataResponse(ticket=bytes(32), tcp_port=silent.getsockname()[1])
        given_up: list[Transport] = []
        channel = BulkChannel(
            ChannelSettings(address="127.0.0.1:1"),
            lambda *_: opened,
            transport=Transport.AUTO,
            fell_back=given_up.append,
        )
        began = time.monotonic()
        with pytest.raises(DeadlineError), channel.connection("job", "a", began + 0.1):
            pytest.fail("there is no connection")
        assert time.monotonic() - began < 2
        assert not given_up  # one slow answer does not rule out the transport
        assert Transport.TCP not in channel._not_before
        channel.close()


def test_fallback_to_grpc_gets_the_rest_of_the_callers_deadline() -> None:
    left: list[float] = []

    def open_data(request: Any, context: Any) -> Any:
        time.sleep(0.5)  # simulates a busy server
        context.abort_with_status(to_status(LimitError("no more", reason="CONNECTIONS_EXHAUSTED")))

    def push(requests: Any, context: Any) -> bytes:
        left.append(context.time_remaining())
        for _ in requests:
            pass
        return b""

    def pull(request: Any, context: Any) -> Iterator[bytes]:
        left.append(context.time_remaining())
        return iter(())

    server = grpc.server(ThreadPoolExecutor(2))
    handlers = {
        "OpenData": grpc.unary_unary_rpc_method_handler(open_data),
        "Push": grpc.stream_unary_rpc_method_handler(push),
        "Pull": grpc.unary_stream_rpc_method_handler(pull),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        for call in (
            lambda client: client.push(
                [(pb.PushHeader(), memoryview(b""))], deadline=timedelta(seconds=60)
            ),
            lambda client: client.pull(
                pb.PullRequest(), lambda _: None, deadline=timedelta(seconds=60)
            ),
        ):
            with ParameterServerClient(ChannelSettings(address=f"127.0.0.1:{port}")) as client:
                call(client)
        # the client asked twice: for shared memory and for TCP
        assert [each < 59.1 for each in left] == [True, True]
    finally:
        server.stop(None).wait(30)
