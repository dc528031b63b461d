"""The bulk channel's server on its own event loop: it disconnects stalled streams, and lets streams
end when it stops."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import trustme
from prometheus_client import CollectorRegistry
from shoal_common.bulk.area import SharedArea
from shoal_common.bulk.frames import HEAD_BYTES, Frame, Kind, greeting, head, parse_head
from shoal_common.bulk.transport import Transport
from shoal_common.rpc.status import from_error_message
from shoal_common.security.authentication import TlsSettings
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_ps_server.consistency.clocks import Clocks, Consistency, ConsistencyMode
from shoal_ps_server.consistency.fence import Fence
from shoal_ps_server.consistency.membership import Membership
from shoal_ps_server.metrics import Metrics
from shoal_ps_server.service.bulk.server import BulkServer
from shoal_ps_server.service.bulk.tickets import Speaker, Tickets
from shoal_ps_server.service.intake import Intake
from shoal_ps_server.service.layouts import Layouts
from shoal_ps_server.service.pulls import Pulls
from shoal_ps_server.service.staging import Staging
from shoal_ps_server.service.transfers import Transfers
from shoal_ps_server.shard.reading import Copies
from shoal_ps_server.storage.changes import Changes
from shoal_ps_server.storage.image import Members

LENGTH = 3 << 20
"""Number of elements of the partition, whose bytes exceed what loopback sockets buffer."""
PULL = pb.PullRequest(job_id="job", shard_map_epoch=1).SerializeToString()


class Serving:
    """A bulk server with one partition that has values, and members a and b in generation 1."""

    def __init__(self, make, *, idle: timedelta, staging: int, tls: TlsSettings | None) -> None:
        layout = make.layout(make.spec(length=LENGTH))
        self.shard = make.shard(make.spec(length=LENGTH))
        self.staging = Staging(nbytes=staging)
        self.membership = membership = Membership(
            fence=Fence(), clocks=Clocks(), push_wait=timedelta(minutes=10)
        )
        membership.learn(1, ["a", "b"])
        metrics = Metrics(CollectorRegistry())
        layouts = Layouts(
            current=layout, fetch=lambda: asyncio.sleep(0, layout), adopt=lambda _: asyncio.sleep(0)
        )
        self.tickets = Tickets(most_together=100)
        changes = Changes(shard=self.shard, layout=lambda: layout, members=Members)
        intake = Intake(
            job_id="job",
            changes=changes,
            membership=membership,
            layout_of_epoch=layouts.of_epoch,
            applied=lambda *_: None,
            waited=lambda _: None,
            idle_limit=idle,
            staging=self.staging,
        )
        pulls = Pulls(
            shard=self.shard,
            membership=membership,
            quiet=changes.quiet,
            waited=lambda _: None,
            answered=lambda *_: None,
        )
        transfers = Transfers(
            job_id="job",
            check_place=self._has_its_place,
            layouts=layouts,
            intake=intake,
            pulls=pulls,
            metrics=metrics,
        )
        self.server = BulkServer(
            tickets=self.tickets,
            transfers=transfers,
            metrics=metrics,
            tls=tls,
            most_strangers=5,
            idle_limit=idle,
        )
        self.server.start("127.0.0.1", 0)

    async def _has_its_place(self) -> None:
        """Does nothing: the server has no backup."""

    async def connect(self, member_id: str = "a") -> socket.socket:
        """Opens a connection and returns it once it is ready."""
        loop = asyncio.get_running_loop()
        connected = socket.socket()
        connected.setblocking(False)
        await loop.sock_connect(connected, ("127.0.0.1", self.server.port))
        await loop.sock_sendall(
            connected, greeting(self.tickets.issue(Speaker(member_id=member_id), loop.time()))
        )
        assert (await frame(connected)).kind is Kind.READY
        return connected


@pytest.fixture
def serving(make):
    """Returns `serve(idle, staging, tls)`, an async context manager that yields a `Serving`."""

    @asynccontextmanager
    async def serve(
        idle: timedelta = timedelta(seconds=30),
        staging: int = 1 << 30,
        tls: TlsSettings | None = None,
    ) -> AsyncIterator[Serving]:
        made = Serving(make, idle=idle, staging=staging, tls=tls)
        try:
            async with asyncio.timeout(60):
                yield made
        finally:
            await made.server.drain_and_stop(timedelta(0))

    return serve


def descriptors() -> int:
    """Returns the number of file descriptors that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def exactly(connected: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = await asyncio.get_running_loop().sock_recv(connected, nbytes - len(data))
        if not more:
            raise EOFError
        data += more
    return data


async def frame(connected: socket.socket) -> Frame:
    return parse_head(await exactly(connected, HEAD_BYTES))


async def ends(connected: socket.socket) -> bool:
    """Reads until the connection ends. Returns True."""
    loop = asyncio.get_running_loop()
    try:
        while await loop.sock_recv(connected, 1 << 16):
            pass
    except ConnectionResetError:
        pass
    connected.close()
    return True


def opening(member_id: str = "a") -> bytes:
    """Returns the frames that open a push."""
    header = pb.PushHeader(
        job_id="job",
        member_id=member_id,
        generation=1,
        shard_map_epoch=1,
        sequence=1,
        base_version=1,
        dtype=pb.DTYPE_FLOAT32,
        codec=pb.CODEC_RAW,
        length=LENGTH,
        payload_bytes=4 * LENGTH,
    ).SerializeToString()
    return head(Kind.PUSH) + head(Kind.PARTITION, len(header)) + header


def payload() -> bytes:
    data = np.ones(LENGTH, np.float32).tobytes()
    return b"".join(
        head(Kind.DATA, 1 << 20) + data[start : start + (1 << 20)]
        for start in range(0, len(data), 1 << 20)
    )


def test_stalled_upload_is_reported_and_cut_off_and_its_memory_is_released(
    serving,
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with serving(idle=timedelta(seconds=2), staging=4 * LENGTH) as made:
            stalled = await made.connect()
            await loop.sock_sendall(stalled, opening() + head(Kind.DATA, 1000) + bytes(999))
            answer = await frame(stalled)
            assert answer.kind is Kind.ERROR
            assert from_error_message(await exactly(stalled, answer.length)).reason == "STREAM_IDLE"
            assert await ends(stalled)
            other = await made.connect("b")
            await loop.sock_sendall(other, opening("b") + payload() + head(Kind.END))
            answer = await frame(other)
            assert answer.kind is Kind.RESULT
            assert (
                pb.PushResponse.FromString(await exactly(other, answer.length)).results[0].version
                == 2
            )
            other.close()

    asyncio.run(scenario())


def test_partial_head_times_out_and_an_idle_connection_does_not(serving) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with serving(idle=timedelta(milliseconds=100)) as made:
            idle, half = await made.connect(), await made.connect()
            await loop.sock_sendall(half, head(Kind.PUSH)[:3])
            assert await ends(half)
            await loop.sock_sendall(idle, head(Kind.PUSH) + head(Kind.END))
            assert (await frame(idle)).kind is Kind.RESULT
            idle.close()

    asyncio.run(scenario())


def test_client_that_pulls_without_reading_is_cut_off(serving) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with serving(idle=timedelta(milliseconds=100)) as made:
            deaf = await made.connect()
            await loop.sock_sendall(deaf, head(Kind.PULL, len(PULL)) + PULL)
            while made.server._serving:
                await asyncio.sleep(0.01)
            assert await ends(deaf)
            assert not made.shard._partitions[0].readings

    asyncio.run(scenario())


def test_client_that_pulls_into_shared_memory_without_freeing_pieces_is_cut_off(serving) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with serving(idle=timedelta(milliseconds=100)) as made:
            deaf = socket.socket(socket.AF_UNIX)
            deaf.setblocking(False)
            await loop.sock_connect(deaf, f"\0{made.server.memory_name}")
            await loop.sock_sendall(
                deaf, greeting(made.tickets.issue(Speaker(member_id=""), loop.time()))
            )
            data: bytes = b""
            descriptors: list[int] = []
            while not data:
                try:
                    data, descriptors, _, _ = socket.recv_fds(deaf, HEAD_BYTES, 1)
                except BlockingIOError:
                    await asyncio.sleep(0.01)
            SharedArea.received(descriptors[0], parse_head(data).length).close()
            await loop.sock_sendall(deaf, head(Kind.PULL, len(PULL)) + PULL)
            assert await ends(deaf)

    asyncio.run(scenario())


def test_pull_aborted_in_the_middle_of_a_frame_ends_with_its_error(
    serving, make, monkeypatch
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with serving() as made:
            monkeypatch.setattr(made.shard, "_copies", Copies(limit=4 * LENGTH))
            slow = await made.connect()
            await loop.sock_sendall(slow, head(Kind.PULL, len(PULL)) + PULL)
            while (
                not (readings := list(made.shard._partitions[0].readings))
                or not readings[0]._promised
            ):
                # it waits in the middle of a frame
                await asyncio.sleep(0.01)
            for sequence in (1, 2):
                made.shard.push(
                    make.upload(
                        torch.ones(LENGTH),
                        make.spec(length=LENGTH),
                        sequence=sequence,
                        base_version=sequence,
                    )
                )
                # a second copy exceeds the limit
                other = made.shard._partitions[0].read(pb.CODEC_RAW, made.shard._copies)
            answer = await frame(slow)
            assert answer.kind is Kind.PARTITION
            await exactly(slow, answer.length)
            frames = 0
            while (answer := await frame(slow)).kind is Kind.DATA:
                assert not any(await exactly(slow, answer.length)), (
                    "the reader gets the values of the version that it began with"
                )
                frames += 1
            assert 0 < frames < 4 * LENGTH >> 20
            assert from_error_message(await exactly(slow, answer.length)).reason == "PULL_TOO_SLOW"
            assert other.remaining
            await loop.sock_sendall(slow, head(Kind.PUSH) + head(Kind.END))
            assert (await frame(slow)).kind is Kind.RESULT
            slow.close()

    asyncio.run(scenario())


def test_silent_stranger_does_no_harm(serving, monkeypatch) -> None:
    monkeypatch.setattr(
        "shoal_ps_server.service.bulk.server._GREETING_LIMIT", timedelta(milliseconds=100)
    )

    async def scenario() -> None:
        async with serving() as made:
            strangers = [
                socket.create_connection(("127.0.0.1", made.server.port)) for _ in range(5)
            ]
            while len(made.server._strangers[Transport.TCP]) < 5:
                await asyncio.sleep(0.01)
            for stranger in strangers:
                stranger.setblocking(False)
                assert await ends(stranger)
            assert not any(made.server._strangers.values())

    asyncio.run(scenario())


def test_additional_stranger_replaces_the_oldest_and_local_peers_have_their_own_places(
    serving,
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with serving() as made:
            strangers = [
                socket.create_connection(("127.0.0.1", made.server.port)) for _ in range(8)
            ]
            for stranger in strangers:
                stranger.setblocking(False)
            for oldest in strangers[:3]:
                assert await ends(oldest)
            assert len(made.server._strangers[Transport.TCP]) == 5
            # has a ticket, and takes the place of another connection
            (await made.connect()).close()
            assert await ends(strangers[3])
            local = socket.socket(socket.AF_UNIX)
            local.setblocking(False)
            await loop.sock_connect(local, f"\0{made.server.memory_name}")
            await loop.sock_sendall(
                local, greeting(made.tickets.issue(Speaker(member_id=""), loop.time()))
            )
            assert (await frame(local)).kind is Kind.READY
            local.close()
            assert len(made.server._strangers[Transport.TCP]) == 4
            for stranger in strangers[4:]:
                await loop.sock_sendall(
                    stranger, b"no greeting at all, but as long as one, or longer than that"
                )
                assert (await frame(stranger)).kind is Kind.ERROR
                stranger.close()

    asyncio.run(scenario())


def test_handshakes_of_strangers_do_not_run_on_the_event_loop(
    serving, tmp_path, monkeypatch
) -> None:
    """TLS handshakes run outside of the event loop, and a client that never finishes its handshake
    does not delay others."""
    threads: list[str] = []

    class Handshakes(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            threads.append(threading.current_thread().name)
            super().do_handshake(block)

    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    monkeypatch.setattr(ssl.SSLContext, "sslsocket_class", Handshakes)

    async def scenario() -> None:
        async with serving(tls=TlsSettings(certificate=certificate, key=key)) as made:
            silent = [socket.create_connection(("127.0.0.1", made.server.port)) for _ in range(3)]
            while len(made.server._strangers[Transport.TCP]) < 3:
                await asyncio.sleep(0.01)
            context = ssl.create_default_context()
            authority.configure_trust(context)
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", made.server.port, ssl=context
            )
            writer.write(
                greeting(
                    made.tickets.issue(Speaker(member_id="a"), asyncio.get_running_loop().time())
                )
            )
            assert parse_head(await reader.readexactly(HEAD_BYTES)).kind is Kind.READY
            assert len(made.server._strangers[Transport.TCP]) == 3
            writer.close()
            for stranger in silent:
                stranger.close()
            while made.server._serving:
                await asyncio.sleep(0.01)
        assert len(threads) >= 5
        assert {name.rpartition("_")[0] for name in threads} == {"shoal-ps-tls"}

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.PULL])
@pytest.mark.parametrize("over", [Transport.TCP, Transport.MEMORY])
def test_peer_that_disconnects_while_its_stream_waits_is_noticed(serving, over, kind) -> None:
    """The server notices that a peer has closed its connection while the peer's stream is waiting
    for another member under bsp. With gRPC, the call is cancelled in this case."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with serving(idle=timedelta(minutes=10), staging=4 * LENGTH) as made:
            made.membership.consistency = Consistency(mode=ConsistencyMode.BSP)
            made.membership.finished("a", 0)
            made.membership.finished("b", 0)
            if over is Transport.TCP:
                waiting = await made.connect()
            else:
                waiting = socket.socket(socket.AF_UNIX)
                waiting.setblocking(False)
                await loop.sock_connect(waiting, f"\0{made.server.memory_name}")
                await loop.sock_sendall(
                    waiting, greeting(made.tickets.issue(Speaker(member_id="a"), loop.time()))
                )
                assert (await frame(waiting)).kind is Kind.READY
            pull = pb.PullRequest(
                job_id="job",
                shard_map_epoch=1,
                member_id="a",
                generation=1,
                clock=1,
                wait_ms=60_000,
            ).SerializeToString()
            begun = (
                opening() + head(Kind.DATA, 1000)
                if kind is Kind.PUSH
                else head(kind, len(pull)) + pull
            )
            await loop.sock_sendall(waiting, begun)
            while not made.membership._news._waiters:
                await asyncio.sleep(0.01)
            assert any(made.server._serving.values())
            waiting.close()
            while made.server._serving:
                await asyncio.sleep(0.01)
            assert not made.membership._news._waiters

    asyncio.run(scenario())


def test_stopping_server_lets_a_stream_end_and_cuts_idle_connections(serving) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with serving() as made:
            idle, busy = await made.connect("b"), await made.connect()
            await loop.sock_sendall(busy, opening())
            while not any(made.server._serving.values()):
                await asyncio.sleep(0.01)
            stopping = asyncio.create_task(made.server.drain_and_stop(timedelta(seconds=30)))
            assert await ends(idle)
            assert not stopping.done()
            await loop.sock_sendall(busy, payload() + head(Kind.END))
            assert (await frame(busy)).kind is Kind.RESULT
            assert await ends(busy)
            await stopping
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", made.server.port))

    asyncio.run(scenario())


@pytest.mark.parametrize("turns", range(5))
def test_client_that_connects_during_shutdown_is_disconnected(serving, turns) -> None:
    """A client that connects while the server stops is disconnected instead of being accepted and
    forgotten. The server stops `turns` iterations of the event loop after the connection."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with serving() as made:
            for _ in range(3):  # in which the server begins to accept
                await asyncio.sleep(0)
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(f"\0{made.server.memory_name}")
                client.setblocking(False)
                for _ in range(turns):
                    await asyncio.sleep(0)
                await made.server.drain_and_stop(timedelta(0))
                async with asyncio.timeout(10):
                    with suppress(ConnectionResetError):
                        assert await loop.sock_recv(client, 1) == b""

    asyncio.run(scenario())


def test_descriptors_of_shared_memory_are_closed_with_their_connections(serving) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with serving() as made:
            before = descriptors()
            for _ in range(20):
                local = socket.socket(socket.AF_UNIX)
                local.setblocking(False)
                await loop.sock_connect(local, f"\0{made.server.memory_name}")
                await loop.sock_sendall(
                    local, greeting(made.tickets.issue(Speaker(member_id=""), loop.time()))
                )
                # it closes without receiving the descriptor
                assert (await frame(local)).kind is Kind.READY
                local.close()
            while made.server._serving:
                await asyncio.sleep(0.01)
            assert descriptors() == before

    asyncio.run(scenario())


def test_endless_frames_do_not_starve_other_connections(serving) -> None:
    async def scenario() -> None:
        async with serving() as serve:
            connected = await serve.connect()
            refused = pb.PushHeader(job_id="another job", member_id="a").SerializeToString()
            begun = head(Kind.PUSH) + head(Kind.PARTITION, len(refused)) + refused
            flood = asyncio.create_task(
                asyncio.get_running_loop().sock_sendall(
                    connected, begun + (head(Kind.DATA, 1) + b"x") * 200_000 + head(Kind.END)
                )
            )
            longest = 0.0
            while not flood.done():
                before = time.monotonic()
                await asyncio.sleep(0)
                longest = max(longest, time.monotonic() - before)
            await flood
            assert longest < 0.3
            connected.close()

    asyncio.run(scenario())
