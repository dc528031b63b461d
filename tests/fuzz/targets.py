"""Targets of the messages: each RPC of each service, the HTTP ports, the bulk port, and a member's
state donor."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor
from shoal_common.bulk.frames import DATA_BYTES, Kind, greeting
from shoal_common.errors import LimitError
from shoal_common.security.certificates import PairContexts
from shoal_protos.v1 import coordinator_pb2, parameter_server_pb2
from shoal_worker.elastic.group.transfer import StateDonor

from tests.fuzz.cluster import MEMBER, OTHER, SERVED, Cluster, connected
from tests.fuzz.messages import Messages

_ANSWER_S: Final = 0.5
"""Time in seconds to wait for an answer. Some calls wait for events that will never happen."""
_BUGS: Final = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED)

_WORDS: Final = ("weight", "w", MEMBER, "somebody", "sgd", "adam", "float32", "server-0")
_READING: Final = ("GetJob", "ListJobs", "GetRanks", "GetShardMap", "WatchEvents")
"""RPCs of the coordinator that may name the continuing job. The other RPCs could end it, as they
are meant to."""

_METHODS: Final = ("GET", "GET", "POST", "PUT", "HEAD", "", "\0", "GET GET", "X" * 5000)
_PATHS: Final = (
    *(
        "/metrics",
        "/sd",
        "/healthz",
        "/",
        "//",
        "/%00",
        "/" + "a" * 70_000,
        "/metrics?x=" + "&" * 300,
        "*",
        "\xe9",
    ),
    *(
        "/api/jobs",
        "/api/job",
        f"/api/job?job={SERVED}",
        "/api/job?job=" + "a" * 3_000,
        "/api/job?job=%00&job=%ff",
    ),
    *(
        f"/api/events?job={SERVED}",
        f"/api/events?job={SERVED}&after=9-9",
        f"/api/events?job={SERVED}&after=%00",
        "/api/events?after=0-0",
    ),
)
_HEADERS: Final = (
    "Host: x",
    "Authorization: Bearer \xff",
    "Accept: \t",
    "Content-Length: -1",
    "A" * 70_000,
    ": ",
    "X: y\rZ: w",
)

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

Shoot = Callable[[random.Random], str]
"""Sends one message and returns the kind of outcome. Raises AssertionError for a forbidden
outcome."""


def rpcs(cluster: Cluster, channels: dict[str, grpc.Channel]) -> Iterator[tuple[str, Shoot]]:
    """Yields the RPCs by name. `channels` connect to the coordinator and the server."""
    services = {
        "coordinator": coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"],
        "server-0": parameter_server_pb2.DESCRIPTOR.services_by_name["ParameterServer"],
    }
    for name, service in services.items():
        for method in service.methods:
            job = SERVED if name == "server-0" or method.name in _READING else OTHER
            likely = (
                {"job_id": job} if name == "coordinator" else {**_likely(cluster), "job_id": job}
            )
            whole = cluster.push_message if method.name == "Push" else None
            yield f"{name} {method.name}", _rpc(channels[name], method, likely, whole)


def _likely(cluster: Cluster) -> dict[str, Any]:
    """Returns the field values of a push by the member."""
    partition = cluster.shard_map.partitions[0]
    length = sum(piece.length for piece in partition.pieces)
    return {
        "member_id": MEMBER,
        "generation": 1,
        "shard_map_epoch": cluster.shard_map.epoch,
        "partition_id": 0,
        "length": length,
        "payload_bytes": 4 * length,
        "dtype": parameter_server_pb2.DTYPE_FLOAT32,
        "codec": parameter_server_pb2.CODEC_RAW,
        "base_version": 1,
        "wait_ms": 0,
    }


def _rpc(
    channel: grpc.Channel,
    method: MethodDescriptor,
    likely: Mapping[str, Any],
    whole: Callable[[], bytes] | None,
) -> Shoot:
    """Returns a function that calls the RPC. `whole` creates a valid message, which is sent
    unchanged or damaged."""
    ways = (method.client_streaming, method.server_streaming)
    kind = "_".join("stream" if streaming else "unary" for streaming in ways)
    path = f"/{method.containing_service.full_name}/{method.name}"
    call = getattr(channel, kind)(path, bytes, bytes)

    def shoot(chance: random.Random) -> str:
        messages = Messages(chance, _WORDS, likely)
        sent = [
            messages.encoded(method.input_type)
            for _ in range(chance.randrange(1, 4) if method.client_streaming else 1)
        ]
        if whole is not None and chance.random() < 0.6:
            sent = [messages.spoilt(whole()) if chance.random() < 0.7 else whole()]
        metadata = (
            ()
            if chance.random() < 0.8
            else (("shoal-member-key", chance.choice(("", "x", "0" * 32, "~" * 9))),)
        )
        try:
            answer = call(
                iter(sent) if method.client_streaming else sent[0],
                timeout=_ANSWER_S,
                metadata=metadata,
            )
            if method.server_streaming:
                next(answer, None)
                answer.cancel()
        except grpc.RpcError as error:
            if error.code() in _BUGS:
                raise AssertionError(
                    f"{path}: {error.code()} {error.details()}; sent "
                    f"{[each.hex() for each in sent]}"
                ) from error
            return str(error.code().name)
        return "OK"

    return shoot


def http2(cluster: Cluster) -> Iterator[tuple[str, Shoot]]:
    """Yields the gRPC ports as targets below gRPC: they receive invalid HTTP/2 frames."""

    def spoken(address: str) -> Shoot:
        def shoot(chance: random.Random) -> str:
            data = bytearray(_PREFACE if chance.random() < 0.8 else chance.randbytes(24))
            for _ in range(chance.randrange(8)):
                body = chance.randbytes(chance.choice((0, 4, 6, 8, 40, 1000)))
                length = len(body) if chance.random() < 0.8 else chance.randrange(1 << 24)
                stream = chance.choice((0, 1, 2, 3, (1 << 31) - 1))
                data += (
                    length.to_bytes(3, "big")
                    + bytes([chance.randrange(12), chance.randrange(256)])
                    + stream.to_bytes(4, "big")
                    + body
                )
            return _exchange(connected(address), bytes(data))

        return shoot

    for each in cluster.local.services:
        yield f"{each.name} HTTP/2", spoken(each.address)


def http(cluster: Cluster) -> Iterator[tuple[str, Shoot]]:
    """Yields the services' HTTP ports."""

    def spoken(address: str) -> Shoot:
        def shoot(chance: random.Random) -> str:
            headers = [chance.choice(_HEADERS) for _ in range(chance.choice((0, 1, 3, 150)))]
            version = chance.choice(("1.1", "1.0", "0.9", "9", "x"))
            first = f"{chance.choice(_METHODS)} {chance.choice(_PATHS)} HTTP/{version}"
            data = "\r\n".join([first, *headers, "", ""]).encode("latin-1")
            if chance.random() < 0.3:
                data = Messages(chance, ()).spoilt(data)
            return _exchange(connected(address), data)

        return shoot

    for name, address in cluster.http.items():
        yield f"{name} HTTP", spoken(address)


def bulk(cluster: Cluster) -> Iterator[tuple[str, Shoot]]:
    """Yields the server's bulk port: with a valid ticket, an invalid one, and none."""
    port = cluster.bulk_port
    pushed = parameter_server_pb2.PushHeader.DESCRIPTOR
    pulled = parameter_server_pb2.PullRequest.DESCRIPTOR
    likely = {**_likely(cluster), "job_id": SERVED}

    def frames(chance: random.Random) -> bytes:
        messages, sent = Messages(chance, _WORDS, likely), bytearray()
        for _ in range(chance.randrange(1, 6)):
            kind = chance.choice(list(Kind))
            body = (
                messages.encoded(pulled if kind is Kind.PULL else pushed)
                if chance.random() < 0.8
                else chance.randbytes(chance.randrange(99))
            )
            length = (
                len(body)
                if chance.random() < 0.8
                else chance.choice((0, DATA_BYTES, DATA_BYTES + 1, (1 << 32) - 1))
            )
            zeros = bytes(3) if chance.random() < 0.95 else b"\1\2\3"
            number = int(kind) if chance.random() < 0.95 else chance.randrange(256)
            sent += bytes([number]) + zeros + length.to_bytes(4, "big") + body
        return bytes(sent)

    def shoot(chance: random.Random) -> str:
        kind = chance.random()
        if kind < 0.6:
            try:
                first = greeting(
                    cluster.client.open_data(SERVED, chance.choice(("", MEMBER))).ticket
                )
            except LimitError:  # the earlier tickets are valid for ten seconds
                return "RESOURCE_EXHAUSTED"
        elif kind < 0.8:
            first = greeting(chance.randbytes(32))
        else:
            first = b""
        data = first + frames(chance)
        return _exchange(
            connected(f"127.0.0.1:{port}"),
            data if chance.random() < 0.8 else Messages(chance, ()).spoilt(data),
        )

    yield "server-0 bulk", shoot


def donors(stack: contextlib.ExitStack) -> Iterator[tuple[str, Shoot]]:
    """Yields a member's donor with an open offer, in plain text and over TLS."""
    for secure in (False, True):
        donor = stack.enter_context(contextlib.closing(StateDonor("127.0.0.1", secure=secure)))
        stack.enter_context(donor.offering({"x": 1}, "0" * 32))
        yield f"donor{' over TLS' if secure else ''}", _donor(donor.address, secure=secure)


def _donor(address: str, *, secure: bool) -> Shoot:
    def shoot(chance: random.Random) -> str:
        nonce = b"0" * 32 if chance.random() < 0.5 else chance.randbytes(32)
        numbers = [
            chance.choice((0, 1, 2, 255, (1 << 32) - 1)).to_bytes(4, "big") for _ in range(2)
        ]
        data = b"SHOALST1" + nonce + b"".join(numbers)
        if chance.random() < 0.5:
            data = Messages(chance, ()).spoilt(data)
        connection = connected(address)
        if secure and chance.random() < 0.5:
            connection = PairContexts.caller().wrap_socket(connection)
        return _exchange(connection, data)

    return shoot


def _exchange(connection: socket.socket, data: bytes) -> str:
    """Sends the data, closes the sending direction, and receives the answer."""
    with connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.sendall(data)
            if not isinstance(connection, ssl.SSLSocket):
                connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(4096)
        except TimeoutError:
            return "no answer"
        except OSError:
            return "closed"
    return "answered" if answer else "closed"


Tally = Counter[tuple[str, str]]
"""Number of occurrences by target and outcome."""
