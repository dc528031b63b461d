"""Client channels: deadlines, retries, keepalive, tokens on every kind of call, and closing. Uses
real gRPC on real sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import grpc
import pytest
from prometheus_client import CollectorRegistry
from shoal.launcher.processes.ports import ReservedPort
from shoal_common.clients import CoordinatorClient, calls
from shoal_common.errors import DeadlineError, ShoalError, UnavailableError
from shoal_common.rpc.channel import ChannelSettings, aio_channel, channel
from shoal_common.rpc.metrics import ClientMetricsInterceptor
from shoal_common.rpc.status import from_rpc_error
from shoal_common.security.authentication import Role, TokenTable
from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_protos.v1 import coordinator_pb2_grpc

SHORT = {"first_backoff": timedelta(milliseconds=10), "longest_backoff": timedelta(milliseconds=20)}


class Flaky(coordinator_pb2_grpc.CoordinatorServicer):
    """A service that is unavailable for the first `failures` calls."""

    def __init__(self, failures: int, error: type[ShoalError] = UnavailableError) -> None:
        self.failures = failures
        self.error = error
        self.calls = 0

    def _attempt(self):
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error("not now")

    async def GetJob(self, request, context):
        self._attempt()
        return pb.GetJobResponse(now_unix_ms=self.calls)

    async def LeaseBatches(self, request, context):
        self._attempt()
        return pb.LeaseBatchesResponse()

    async def WatchEvents(self, request, context):
        yield pb.Event(event_id="1-0")
        await asyncio.Event().wait()

    async def JoinSession(self, request_iterator, context):
        async for _ in request_iterator:
            yield pb.MemberDirective()


LEASE = {"loader": "train", "epoch": 0, "batches_in_epoch": 4, "want": 1}


# ------------------------------------------------------------------------------------------ retries


def test_idempotent_calls_are_repeated_while_the_server_is_unavailable(serve):
    flaky = Flaky(failures=2)
    with serve(flaky).client(**SHORT) as client:
        assert client.get_job("mnist").now_unix_ms == 3


def test_repeating_ends_after_the_configured_attempts(serve):
    flaky = Flaky(failures=99)
    with (
        serve(flaky).client(attempts=3, **SHORT) as client,
        pytest.raises(UnavailableError, match="not now"),
    ):
        client.get_job("mnist")
    assert flaky.calls == 3


def test_calls_that_are_not_idempotent_are_made_once(serve):
    flaky = Flaky(failures=99)
    with serve(flaky).client(**SHORT) as client, pytest.raises(UnavailableError):
        client.lease_batches("mnist", "m1", **LEASE)
    assert flaky.calls == 1


def test_other_errors_are_not_repeated(serve):
    flaky = Flaky(failures=99, error=DeadlineError)
    with serve(flaky).client(**SHORT) as client, pytest.raises(DeadlineError):
        client.get_job("mnist")
    assert flaky.calls == 1


def test_client_reconnects_to_a_server_that_returns(serve, request):
    reserved = ReservedPort()
    request.addfinalizer(reserved.close)
    first = serve(Flaky(failures=0), listen=f"127.0.0.1:{reserved.port}")
    with first.client(**SHORT) as client:
        assert client.get_job("mnist").now_unix_ms == 1
        first.run(first.server.drain_and_stop())
        with pytest.raises(UnavailableError, match=f"GetJob at {first.address}"):
            client.get_job("mnist")
        serve(Flaky(failures=0), listen=first.address)
        deadline = time.monotonic() + 60
        while True:
            try:
                assert client.get_job("mnist").now_unix_ms == 1
                break
            except UnavailableError:
                assert time.monotonic() < deadline, "not found again within 60 s"


def test_unreachable_name_gets_a_fresh_channel_and_streams_keep_theirs(serve, request, monkeypatch):
    """After a failed lookup, gRPC waits for up to two minutes before it looks a name up again."""
    monkeypatch.setattr(calls, "_RENEW_EVERY_S", 0.0)
    made = []
    monkeypatch.setattr(
        calls,
        "channel",
        lambda *given, **options: made.append(channel(*given, **options)) or made[-1],
    )
    reserved = ReservedPort()
    request.addfinalizer(reserved.close)
    running = serve(Flaky(failures=0), listen=f"127.0.0.1:{reserved.port}")
    named = f"localhost:{reserved.port}"
    with CoordinatorClient(running.settings(address=named, attempts=1)) as client:
        stream = client.watch_events("mnist", follow=True)
        assert next(iter(stream)).event_id == "1-0"
        monkeypatch.setattr(client._caller.stub, "GetJob", _unreachable)
        with pytest.raises(UnavailableError, match="address lookup failed"):
            client.get_job("mnist")
        assert len(made) == 2
        assert client.get_job("mnist").now_unix_ms == 1, "over the fresh one"
        assert len(made) == 2, "which stays as long as it works"
        ended = threading.Thread(target=client.close)
        ended.start()
        with pytest.raises(UnavailableError) as closed:
            next(stream)
        ended.join()
        assert closed.value.reason == "CLIENT_CLOSED"


def test_a_client_of_an_address_keeps_its_channel(serve, monkeypatch):
    monkeypatch.setattr(calls, "_RENEW_EVERY_S", 0.0)
    with serve(Flaky(failures=0)).client(attempts=1) as client:
        before = client._caller.stub
        monkeypatch.setattr(before, "GetJob", _unreachable)
        with pytest.raises(UnavailableError):
            client.get_job("mnist")
        assert client._caller.stub is before


def test_a_refusal_by_the_server_itself_keeps_the_channel(serve, monkeypatch):
    monkeypatch.setattr(calls, "_RENEW_EVERY_S", 0.0)
    running = serve(Flaky(failures=1))
    with CoordinatorClient(
        running.settings(address=f"localhost:{running.address.rpartition(':')[2]}", attempts=1)
    ) as client:
        before = client._caller.stub
        with pytest.raises(UnavailableError, match="not now"):
            client.get_job("mnist")
        assert client._caller.stub is before


class _Unreachable(grpc.RpcError):
    def code(self):
        return grpc.StatusCode.UNAVAILABLE

    def details(self):
        return "address lookup failed for coordinator:7000: Domain name not found"

    def trailing_metadata(self):
        return ()


def _unreachable(*_, **__):
    raise _Unreachable


# ---------------------------------------------------------------------------------------- deadlines


@pytest.fixture
def silent_address():
    """Address of a socket that accepts connections and sends nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_silent_server_hits_the_deadline_whose_error_names_the_request(
    silent_address,
):
    settings = ChannelSettings(address=silent_address, deadline=timedelta(milliseconds=200))
    with CoordinatorClient(settings) as client:
        start = time.monotonic()
        with pytest.raises(DeadlineError, match=f"GetJob at {silent_address}"):
            client.get_job("mnist")
        assert time.monotonic() - start < 9  # a client's default deadline is 10 s


def test_deadline_of_a_call_overrides_the_clients(silent_address):
    with CoordinatorClient(
        ChannelSettings(address=silent_address, deadline=timedelta(hours=1))
    ) as client:
        for call in (
            lambda: client.list_jobs(deadline=timedelta(milliseconds=50)),
            lambda: list(client.watch_events("mnist", deadline=timedelta(milliseconds=50))),
        ):
            with pytest.raises(DeadlineError):
                call()


def test_port_without_a_listener_is_unavailable_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = ChannelSettings(address=address, **SHORT)
        with (
            CoordinatorClient(settings) as client,
            pytest.raises(UnavailableError, match=f"GetJob at {address}: "),
        ):
            client.get_job("mnist")


# ------------------------------------------------------------------------------ streams and closing


def test_cancelling_a_stream_ends_its_iteration_without_an_error(serve):
    with serve(Flaky(0)).client() as client:
        events = client.watch_events("mnist", follow=True)
        assert next(events).event_id == "1-0"
        canceller = threading.Thread(target=events.cancel)
        canceller.start()
        assert list(events) == []
        canceller.join()


def test_a_closed_client_says_so(serve):
    client = serve(Flaky(0)).client()
    events = client.watch_events("mnist", follow=True)
    next(events)
    client.close()
    client.close()
    for call in (
        lambda: client.get_job("mnist"),
        lambda: next(events),
        lambda: client.watch_events("mnist"),
    ):
        with pytest.raises(UnavailableError) as raised:
            call()
        assert raised.value.reason == "CLIENT_CLOSED"


# ------------------------------------------------------------------------------------------- tokens


def test_asynchronous_channels_carry_the_token_on_every_kind_of_call(serve):
    running = serve(Flaky(0), tokens=TokenTable({"w": Role.WORKER}))

    async def calls(token):
        async with aio_channel(running.settings(token=token)) as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            job = await stub.GetJob(pb.GetJobRequest(), timeout=20)
            (directive,) = [d async for d in stub.JoinSession(_messages(), timeout=20)]
            events = stub.WatchEvents(pb.WatchEventsRequest(), timeout=20)
            event = await events.read()
            events.cancel()
            return job.now_unix_ms, directive, event.event_id

    assert asyncio.run(calls("w")) == (1, pb.MemberDirective(), "1-0")
    with pytest.raises(grpc.RpcError) as raised:
        asyncio.run(calls("x"))
    error = from_rpc_error(raised.value)
    assert error.reason == "TOKEN_INVALID"


async def _messages():
    yield pb.MemberMessage(ready=pb.Ready())


# ------------------------------------------------------------------------------------------ metrics


def test_client_metrics_count_calls_by_kind_method_and_code(serve):
    registry = CollectorRegistry()
    with CoordinatorClient(
        serve(Flaky(0)).settings(), interceptors=[ClientMetricsInterceptor(registry)]
    ) as client:
        client.get_job("mnist")
        list(client.join_session(iter([pb.MemberMessage()])))
        with pytest.raises(ShoalError):
            client.stop_job("mnist")

    def value(name, method, kind, **more):
        labels = {
            "grpc_service": "shoal.v1.Coordinator",
            "grpc_method": method,
            "grpc_type": kind,
            **more,
        }
        return registry.get_sample_value(f"grpc_client_{name}", labels)

    assert value("started_total", "GetJob", "unary") == 1
    assert value("handled_total", "GetJob", "unary", grpc_code="OK") == 1
    assert value("handling_seconds_count", "GetJob", "unary") == 1
    assert value("handled_total", "JoinSession", "bidi_stream", grpc_code="OK") == 1
    assert value("handled_total", "StopJob", "unary", grpc_code="Unimplemented") == 1


# ---------------------------------------------------------------------------------------- keepalive


def test_servers_keepalive_limit_is_the_configured_one(serve):
    """A client that pings faster than the server allows is disconnected; a client within the limit
    stays connected.

    The client pings every 50 ms on an idle stream. gRPC sends GOAWAY (too_many_pings) after the
    third ping that is too early.
    """
    fast = {"keepalive": timedelta(milliseconds=50), "attempts": 1}
    allowing = serve(Flaky(0), shortest_keepalive=timedelta(milliseconds=10))
    with allowing.client(**fast) as client:
        events = client.watch_events("mnist", follow=True)
        assert next(events).event_id == "1-0"
        # this waits for no condition: it is time for a dozen pings
        canceller = threading.Timer(0.7, events.cancel)
        canceller.start()
        assert list(events) == []
        canceller.join()
    forbidding = serve(Flaky(0), shortest_keepalive=timedelta(seconds=60))
    with forbidding.client(**fast) as client:
        events = client.watch_events("mnist", follow=True, deadline=timedelta(seconds=60))
        assert next(events).event_id == "1-0"
        with pytest.raises(ShoalError, match=r"Too many pings|too_many_pings"):
            next(events)


def test_a_peer_that_stops_answering_is_noticed_by_keepalive(tmp_path):
    """The server process is stopped (SIGSTOP), so its socket stays open and silent."""
    script = tmp_path / "server.py"
    script.write_text(_SERVER)
    server = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        port = int(server.stdout.readline())
        settings = ChannelSettings(
            address=f"127.0.0.1:{port}",
            keepalive=timedelta(milliseconds=300),
            keepalive_timeout=timedelta(seconds=2),
        )
        with CoordinatorClient(settings) as client:
            events = client.watch_events("mnist", follow=True, deadline=timedelta(seconds=90))
            assert next(events).event_id == "1-0"
            os.kill(server.pid, signal.SIGSTOP)
            with pytest.raises(UnavailableError):  # and not by the deadline
                next(events)
    finally:
        server.kill()
        server.wait(10)
        server.stdout.close()


_SERVER = """
import asyncio
from datetime import timedelta
from prometheus_client import CollectorRegistry
from shoal_common.rpc.server import RpcServer, ServerSettings
from shoal_protos.v1 import coordinator_pb2 as pb, coordinator_pb2_grpc


class Servicer(coordinator_pb2_grpc.CoordinatorServicer):
    async def WatchEvents(self, request, context):
        yield pb.Event(event_id="1-0")
        await asyncio.Event().wait()


async def main():
    names = [
        f"/shoal.v1.Coordinator/{m.name}"
        for m in pb.DESCRIPTOR.services_by_name["Coordinator"].methods
    ]
    server = RpcServer(
        ServerSettings(listen="127.0.0.1:0", shortest_keepalive=timedelta(milliseconds=10)),
        service_name="shoal.v1.Coordinator",
        register=lambda s: coordinator_pb2_grpc.add_CoordinatorServicer_to_server(Servicer(), s),
        allowed_roles=dict.fromkeys(names, frozenset()),
        metrics_registry=CollectorRegistry(),
    )
    print(await server.start(), flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
"""


def test_fork_support_is_off_before_grpc_is_imported():
    code = (
        "import shoal_common, os, sys; assert 'grpc' not in sys.modules; "
        "print(os.environ['GRPC_ENABLE_FORK_SUPPORT'])"
    )
    environment = {
        key: value for key, value in os.environ.items() if key != "GRPC_ENABLE_FORK_SUPPORT"
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "0\n"
