"""The bulk channel: which clients get one, what it refuses, the fallback when it is unavailable or
breaks, and that it leaves nothing behind."""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import grpc
import numpy as np
import pytest
import trustme
from shoal_common.bulk.area import SharedArea
from shoal_common.bulk.frames import (
    HEAD_BYTES,
    LARGEST_MESSAGE_BYTES,
    TICKET_BYTES,
    Kind,
    greeting,
    head,
    parse_head,
)
from shoal_common.bulk.transport import Transport
from shoal_common.clients.bulk import OpenedConnection
from shoal_common.clients.parameter_server import ParameterServerClient
from shoal_common.clients.pull import PullReceiver
from shoal_common.errors import LimitError, PermissionDeniedError, ShoalError, UnavailableError
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.rpc.status import from_error_message
from shoal_common.security.authentication import TlsSettings
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_ps_server.service.bulk.tickets import MOST_OF_A_MEMBER

BOTH = pytest.mark.parametrize("transport", [Transport.TCP, Transport.MEMORY])


class Wire:
    """A bulk connection whose bytes the test writes itself."""

    def __init__(
        self, opened: pb.OpenDataResponse, *, memory: bool = False, ticket: bytes | None = None
    ) -> None:
        if memory:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(f"\0{opened.memory_name}")
        else:
            self.socket = socket.create_connection(("127.0.0.1", opened.tcp_port))
        self.socket.settimeout(30)
        self.memory = memory
        self.socket.sendall(greeting(opened.ticket if ticket is None else ticket))

    def ready(self) -> int:
        """Returns the descriptor of the shared memory; 0: none."""
        data, descriptors, _, _ = socket.recv_fds(self.socket, HEAD_BYTES, 1)
        assert parse_head(data).kind is Kind.READY
        return descriptors[0] if descriptors else 0

    def send(self, kind: Kind, message: bytes = b"") -> None:
        self.socket.sendall(head(kind, len(message)) + message)

    def answer(self) -> tuple[Kind, bytes]:
        frame = parse_head(self._exactly(HEAD_BYTES))
        return frame.kind, self._exactly(frame.length)

    def refusal(self) -> ShoalError:
        kind, message = self.answer()
        assert kind is Kind.ERROR
        return from_error_message(message)

    def is_closed(self) -> bool:
        """Returns whether the server has closed the connection; a TLS alert counts as closed."""
        try:
            return self.socket.recv(1) in (b"", b"\x15")
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.socket.close()

    def _exactly(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            more = self.socket.recv(nbytes - len(data))
            assert more, "the server closed the connection"
            data += more
        return data


def metric(cluster, line: str) -> float:
    """Returns the value of a line of /metrics; 0 if there is no such line."""
    with urllib.request.urlopen(f"http://{cluster.running.http}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return next(
        (float(each.rpartition(" ")[2]) for each in lines if each.startswith(line + " ")), 0.0
    )


def connections(cluster, transport: Transport) -> float:
    return metric(cluster, f'shoal_ps_bulk_connections{{transport="{transport}"}}')


# ------------------------------------------------------------------------- which clients get one


def test_processes_on_one_machine_share_memory_by_default(cluster) -> None:
    cluster.trainable(cluster.server()).push(1.0)
    assert metric(cluster, 'shoal_ps_streams_total{method="Push",transport="memory"}') == 1
    assert connections(cluster, Transport.MEMORY) == 1


@pytest.mark.parametrize("mutual", [False, True])
def test_bulk_channel_uses_tls_if_the_rpcs_do(cluster, tmp_path, mutual) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    files = {name: tmp_path / f"{name}.pem" for name in ("authority", "certificate", "key")}
    authority.cert_pem.write_to_path(files["authority"])
    issued.cert_chain_pems[0].write_to_path(files["certificate"])
    issued.private_key_pem.write_to_path(files["key"])
    cluster.coordinator.stop()
    cluster.coordinator.credentials = grpc.ssl_server_credentials(
        [(files["key"].read_bytes(), files["certificate"].read_bytes())]
    )
    cluster.coordinator.start()
    cluster.declare()
    served = {
        "tls_ca": files["authority"],
        "tls_cert": files["certificate"],
        "tls_key": files["key"],
    }
    cluster.unregistered(tls_client_ca=files["authority"] if mutual else None, **served)
    cluster.coordinator.registrations.get(timeout=30)
    cluster.coordinator.heartbeats.get(timeout=30)
    client = cluster.client(cluster.running, transport=Transport.TCP, tls=TlsSettings(**files))
    member = cluster.trainable(client)
    member.push(1.0)
    assert all((values.view(np.float32) == -1).all() for values in member.pull().values())
    assert metric(cluster, 'shoal_ps_streams_total{method="Push",transport="tcp"}') == 1
    with closing(Wire(client.open_data("job"))) as stranger:  # its greeting is not a TLS handshake
        assert stranger.is_closed()
    if mutual:  # the RPCs would refuse it as well: here with a ticket that another one got
        authority_alone = TlsSettings(authority=files["authority"])
        channel = ChannelSettings(address=cluster.running.address, tls=authority_alone)
        with pytest.raises((ShoalError, OSError)):
            OpenedConnection.open(
                Transport.TCP, client.open_data("job"), channel, "", until=time.monotonic() + 30
            )


def test_read_only_caller_can_pull_but_not_push(cluster, tmp_path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("worker: wt\nreader: rt\n")
    cluster.server(tokens=tokens, token="st")
    worker, reader = (
        cluster.client(cluster.running, token=token, transport=Transport.TCP)
        for token in ("wt", "rt")
    )
    cluster.trainable(worker)
    assert len(cluster.member(reader).pull(member_id="")) == 3
    for call in (
        lambda: reader.open_data("job", "a"),
        lambda: cluster.member(reader).push(1.0),
        lambda: cluster.member(reader).pull(),
    ):
        with pytest.raises(PermissionDeniedError):
            call()
    with closing(Wire(reader.open_data("job"))) as wire:
        wire.ready()
        wire.send(Kind.PUSH)
        wire.send(Kind.PARTITION, cluster.member(reader).header(0).SerializeToString())
        wire.send(Kind.END)
        assert isinstance(wire.refusal(), PermissionDeniedError)
        wire.send(
            Kind.PULL,
            pb.PullRequest(
                job_id="job", member_id="a", generation=1, shard_map_epoch=1
            ).SerializeToString(),
        )
        assert isinstance(wire.refusal(), PermissionDeniedError)
    assert {each.version for each in worker.get_server().partitions} == {1}


@BOTH
def test_a_ticket_opens_one_connection(cluster, transport) -> None:
    client = cluster.server()
    memory = transport is Transport.MEMORY
    opened = client.open_data("job", "a")
    with (
        closing(Wire(opened, memory=memory)) as first,
        closing(Wire(opened, memory=memory)) as second,
    ):
        assert (
            second.refusal().reason == "TICKET_INVALID"
            or first.refusal().reason == "TICKET_INVALID"
        )
    with closing(Wire(opened, memory=memory, ticket=bytes(TICKET_BYTES))) as guessed:
        assert guessed.refusal().reason == "TICKET_INVALID"
        assert guessed.is_closed()


def test_connections_of_a_member_are_limited(cluster) -> None:
    client = cluster.server()
    wires = [Wire(client.open_data("job", "a")) for _ in range(MOST_OF_A_MEMBER)]
    for wire in wires:
        wire.ready()
    with pytest.raises(LimitError) as caught:
        client.open_data("job", "a")
    assert caught.value.reason == "CONNECTIONS_EXHAUSTED"
    cluster.trainable(client).push(1.0)  # over gRPC
    assert metric(cluster, 'shoal_ps_streams_total{method="Push",transport="grpc"}') == 1
    for wire in wires:
        wire.close()
    cluster.wait_until(lambda: not connections(cluster, Transport.TCP), "the connections to end")
    assert client.open_data("job", "a").ticket


def test_bulk_connections_leave_descriptors_for_everything_else(cluster, start, tmp_path) -> None:
    members = [f"worker-{number}" for number in range(8)]
    cluster.declare(members={1: members})
    flags = (
        "--coordinator",
        cluster.address,
        "--job",
        "job",
        "--server-id",
        "server",
        "--data-dir",
        str(tmp_path / "data"),
    )
    process = start(*flags, fresh=True, most_descriptors=128)
    client = process.client()
    wires: list[Wire] = []
    refusals: set[str] = set()
    for name in members:
        for _ in range(MOST_OF_A_MEMBER):
            try:
                wires.append(Wire(client.open_data("job", name), memory=True))
            except LimitError as error:
                refusals.add(error.reason)
            else:
                os.close(wires[-1].ready())
    assert refusals == {"CONNECTIONS_EXHAUSTED"}
    assert 10 < len(wires) < 32
    late = process.client()  # another connection
    client.configure_optimizer(
        "job",
        pb.OptimizerSpec(name="sgd", hyperparameters={"lr": 1.0}),
        pb.Consistency(mode=pb.Consistency.MODE_ASP),
    )
    member = cluster.member(late, members[-1])
    member.initialize(np.zeros(1))
    late.snapshot("job")  # starts a new file of the journal
    assert {each.version for each in member.push(1.0)} == {2}
    for wire in wires:
        wire.close()
    client.close()
    late.close()


# ------------------------------------------------------------------------------- what it refuses


PULL = pb.PullRequest(job_id="job", member_id="", shard_map_epoch=1).SerializeToString()


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * HEAD_BYTES,
        b"\xff" * HEAD_BYTES,
        b"GET / HTTP/1.1\r\n\r\n",
        head(Kind.DATA, 4) + b"data",
        head(Kind.END),
        head(Kind.FREE),
        head(Kind.ERROR),
        struct.pack("!B3sI", Kind.PULL, b"\0\0\1", 0),
        head(Kind.PULL, LARGEST_MESSAGE_BYTES + 1),
        head(Kind.PUSH) + head(Kind.PULL, len(PULL)) + PULL,
        head(Kind.PUSH) + head(Kind.PUSH),
        head(Kind.PUSH) + head(Kind.DATA, 4) + b"data",
        head(Kind.PUSH) + head(Kind.PARTITION, 0xFFFFFFFF),
    ],
    ids=lambda data: data[:24].hex(),
)
def test_invalid_frame_ends_the_connection_with_one_error(cluster, data) -> None:
    client = cluster.server()
    member = cluster.trainable(client)
    with closing(Wire(client.open_data("job", "a"))) as wire:
        wire.ready()
        wire.socket.sendall(data)
        assert wire.refusal().reason == "STREAM_MALFORMED"
        assert wire.is_closed()
    assert {each.version for each in member.push(1.0)} == {2}


@BOTH
def test_connection_stays_usable_after_a_refusal(cluster, transport) -> None:
    """This also holds after a refusal in the middle of an upload, whose remaining bytes are read
    and discarded."""
    client = cluster.server(("weight", 3 << 20, "float32"), partition=1 << 20)
    member = cluster.trainable(client)
    good, bad = (memoryview(np.full(1 << 20, value, np.float32)) for value in (1, np.nan))
    for _ in range(3):
        with pytest.raises(ShoalError) as caught:
            client.push(
                [(member.header(0), bad), (member.header(1), good), (member.header(2), good)]
            )
        assert caught.value.reason == "GRADIENT_NOT_FINITE"
        with pytest.raises(ShoalError) as caught:
            client.push([(member.header(0, payload_bytes=8), good), (member.header(1), good)])
        assert caught.value.reason == "PAYLOAD_SIZE_MISMATCH"
        with pytest.raises(ShoalError) as caught:
            member.pull(shard_map_epoch=9)
        assert caught.value.reason == "STALE_SHARD_MAP"
    assert {each.version for each in member.push(1.0)} == {2}
    assert all((values.view(np.float32) == -1).all() for values in member.pull().values())
    assert connections(cluster, transport) == 1


def test_client_that_changes_shared_memory_cannot_change_checked_values(cluster) -> None:
    client = cluster.server()
    member = cluster.trainable(client)
    with closing(Wire(client.open_data("job", "a"), memory=True)) as wire:
        descriptor = wire.ready()
        for size in (0, 4096, 1 << 30):
            with pytest.raises(PermissionError):  # the server would be killed by a signal
                os.ftruncate(descriptor, size)
        area = SharedArea.received(descriptor, os.fstat(descriptor).st_size)
        wire.send(Kind.PUSH)
        wire.send(Kind.PARTITION, member.header(0).SerializeToString())
        area.fill(memoryview(np.ones(256, np.float32)).cast("B"))
        wire.socket.sendall(head(Kind.DATA, 1024))
        assert wire.answer()[0] is Kind.FREE
        area._view[:1024] = np.full(256, np.nan, np.float32).tobytes()
        wire.send(Kind.END)
        kind, message = wire.answer()
        assert (kind, pb.PushResponse.FromString(message).results[0].version) == (Kind.RESULT, 2)
        area.close()
    assert (member.pull()[0].view(np.float32) == -1).all()


# ------------------------------------------------------------ when it is unavailable or breaks


def test_closed_port_makes_tensors_go_over_grpc_with_one_warning(cluster, caplog) -> None:
    cluster.server()
    cluster.running.shut_bulk_channel()
    lost: list[Transport] = []
    channel = ChannelSettings(address=cluster.running.address)
    with (
        caplog.at_level(logging.WARNING),
        ParameterServerClient(channel, fell_back=lost.append) as client,
    ):
        member = cluster.trainable(client)
        for _ in range(3):
            member.push(1.0)
            member.pull()
    # A client does not try shared memory with a server that may be on any machine.
    assert lost == [Transport.TCP]
    assert [
        record.getMessage()
        for record in caplog.records
        if "open a bulk channel" in record.getMessage()
    ] != []
    assert sum("open a bulk channel" in record.getMessage() for record in caplog.records) == 1
    assert metric(cluster, 'shoal_ps_streams_total{method="Push",transport="grpc"}') == 3


@BOTH
def test_unavailable_required_transport_is_an_error(cluster, transport) -> None:
    client = cluster.server()
    cluster.running.shut_bulk_channel()
    with pytest.raises(UnavailableError, match=f"transport={transport}") as caught:
        cluster.member(client).push(1.0)
    assert caught.value.reason == "TRANSPORT_UNAVAILABLE"


def test_server_killed_during_a_push_is_unavailable_and_the_push_counts_once(
    cluster, start, tmp_path
) -> None:
    cluster.declare(("weight", 600, "float32"), partition=300)
    process = start(
        "--coordinator",
        cluster.address,
        "--job",
        "job",
        "--server-id",
        "server",
        "--data-dir",
        str(tmp_path / "data"),
    )
    channel = ChannelSettings(address=process.address(), attempts=1)
    clients = {
        name: ParameterServerClient(channel, transport=each)
        for name, each in (("a", Transport.TCP), ("b", Transport.MEMORY))
    }
    cluster.trainable(clients["a"])
    members = [cluster.member(client, name) for name, client in clients.items()]
    payload = memoryview(np.ones(300, np.float32))
    halfway = threading.Barrier(len(members) + 1)

    def push(member) -> None:
        def partitions():
            yield member.header(0), payload
            halfway.wait(30)  # all pushes have begun
            halfway.wait(30)  # the server is dead
            yield member.header(1), payload

        with pytest.raises(UnavailableError, match="Push at"):
            member.client.push(partitions())

    with ThreadPoolExecutor(len(members)) as pool:
        pushing = [pool.submit(push, member) for member in members]
        halfway.wait(30)
        cluster.wait_until(
            lambda: clients["a"].get_server().partitions[0].version == 3,
            "the first partitions to be applied",
        )
        process.end(signal.SIGKILL)
        halfway.wait(30)
        for each in pushing:
            each.result(30)
    for client in clients.values():
        client.close()
    recovered = cluster.unregistered(data_dir=tmp_path / "data")
    for member in members:
        member.client = recovered
        assert [each.duplicate for each in member.push(1.0)] == [True, False]
    assert all((values.view(np.float32) == -2).all() for values in members[0].pull().values())


@BOTH
def test_client_that_disconnects_during_a_push_leaves_complete_partitions(
    cluster, transport
) -> None:
    client = cluster.server()
    member = cluster.trainable(client)
    with closing(Wire(client.open_data("job", "a"), memory=transport is Transport.MEMORY)) as wire:
        if descriptor := wire.ready():
            os.close(descriptor)
        wire.send(Kind.PUSH)
        wire.send(Kind.PARTITION, member.header(0).SerializeToString())
        wire.socket.sendall(head(Kind.DATA, 1024)[: HEAD_BYTES - 2])
    with closing(Wire(client.open_data("job", "a"))) as wire:
        wire.ready()
        wire.send(Kind.PUSH)
        wire.send(Kind.PARTITION, member.header(0).SerializeToString())
        wire.socket.sendall(head(Kind.DATA, 1024) + bytes(1000))
    cluster.wait_until(
        lambda: connections(cluster, Transport.TCP) + connections(cluster, Transport.MEMORY) <= 1,
        "the ends to be noticed",
    )
    assert {each.version for each in member.push(1.0)} == {2}


@BOTH
def test_waiting_pull_ends_with_its_deadline_and_with_its_client(cluster, transport) -> None:
    client = cluster.server()
    early = cluster.member(client, "b")
    request = pb.PullRequest(
        job_id="job", member_id="b", generation=1, shard_map_epoch=1, wait_ms=60_000
    )
    with pytest.raises(ShoalError) as caught:
        client.pull(request, lambda _: None, deadline=timedelta(milliseconds=100))
    assert caught.value.reason == "DEADLINE_EXCEEDED"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: early.pull(wait=timedelta(seconds=60)))
        cluster.wait_until(
            lambda: (
                metric(cluster, f'shoal_ps_streams_total{{method="Pull",transport="{transport}"}}')
                == 2
            ),
            "the second pull",
        )
        client.close()
        with pytest.raises(UnavailableError) as closed:
            waiting.result(30)
    assert closed.value.reason == "CLIENT_CLOSED"


@BOTH
def test_stopping_server_closes_idle_connections_and_the_next_call_finds_its_successor(
    cluster, tmp_path, transport
) -> None:
    client = cluster.server(data_dir=tmp_path / "data")
    member = cluster.trainable(client)
    member.push(1.0)
    began = time.monotonic()
    cluster.running.stop()
    assert time.monotonic() - began < 8, "nobody waits for connections that have nothing to do"
    cluster.unregistered(data_dir=tmp_path / "data", listen=cluster.running.address)
    client.get_server()  # gRPC has found the server again
    assert {each.version for each in member.push(1.0)} == {3}


# ------------------------------------------------------------------------ what it leaves behind


def test_hundreds_of_connections_leave_no_descriptors_and_no_memory(cluster, start) -> None:
    cluster.declare(("weight", 600, "float32"), partition=300)
    # Not forked: the test measures memory, and a fork shares memory with the zygote.
    process = start(
        "--coordinator", cluster.address, "--job", "job", "--server-id", "server", fresh=True
    )
    client = process.client()
    cluster.trainable(client)
    request = pb.PullRequest(job_id="job", shard_map_epoch=1)

    def connect_and_disconnect(times: int) -> None:
        channel = ChannelSettings(address=process.address())
        for _ in range(times):
            for transport in (Transport.TCP, Transport.MEMORY):
                with closing(
                    OpenedConnection.open(
                        transport, client.open_data("job"), channel, "", until=time.monotonic() + 30
                    )
                ) as connection:
                    assert (
                        len(
                            connection.pull(
                                request, PullReceiver(lambda _: None), time.monotonic() + 30
                            )
                        )
                        == 2
                    )

    def descriptors(process: int) -> int:
        return len(list(Path(f"/proc/{process}/fd").iterdir()))

    def resident(process: int) -> int:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )

    connect_and_disconnect(20)
    both = (process.pid, os.getpid())
    before, memory = [descriptors(each) for each in both], [resident(each) for each in both]
    connect_and_disconnect(150)
    for each, had, held in zip(both, before, memory, strict=True):
        cluster.wait_until(
            lambda process=each, most=had + 2: descriptors(process) <= most,
            "descriptors to be closed",
        )
        assert resident(each) < held + (32 << 20), (
            "150 connections have 600 MiB of shared memory, one after another"
        )
    client.close()


@BOTH
def test_many_threads_share_a_client(cluster, transport) -> None:
    client = cluster.server(members={1: [f"worker-{number}" for number in range(4)]})
    cluster.member(client, "worker-0").initialize(np.zeros(1))
    cluster.client(cluster.running).configure_optimizer(
        "job",
        pb.OptimizerSpec(name="sgd", hyperparameters={"lr": 1.0}),
        pb.Consistency(mode=pb.Consistency.MODE_ASP),
    )
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        member = cluster.member(client, f"worker-{number}")
        barrier.wait(30)
        for _ in range(5):
            member.push(1.0)
            member.pull()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert client.get_server().pushes_applied == 60
