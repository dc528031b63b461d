"""The gRPC server used by every service: errors, authentication, health, reflection, metrics,
drain. Uses real gRPC on real sockets."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry
from shoal_common.errors import (
    AuthenticationError,
    ConfigurationError,
    InternalError,
    InvalidRequestError,
    LimitError,
    PermissionDeniedError,
    ShoalError,
    StaleGenerationError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_common.rpc.server import RpcServer, ServerSettings
from shoal_common.security.authentication import Role, TokenTable
from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_protos.v1 import coordinator_pb2_grpc

TOKENS = TokenTable({"admin-t": Role.ADMIN, "worker-t": Role.WORKER, "viewer-t": Role.VIEWER})
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def _calls(client):
    """Returns one call of each kind, as a caller makes it."""
    return {
        "GetJob": lambda: client.get_job("mnist"),
        "ListJobs": client.list_jobs,
        "WatchEvents": lambda: list(client.watch_events("mnist", deadline=timedelta(seconds=20))),
        "JoinSession": lambda: list(
            client.join_session(iter([pb.MemberMessage(ready=pb.Ready())]))
        ),
    }


class Scripted(coordinator_pb2_grpc.CoordinatorServicer):
    """A service that answers, or raises the given error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def GetJob(self, request, context):
        if self.error:
            raise self.error
        return pb.GetJobResponse(now_unix_ms=7)

    async def ListJobs(self, request, context):
        return pb.ListJobsResponse()

    async def WatchEvents(self, request, context):
        yield pb.Event(event_id="1-0")
        if self.error:
            raise self.error

    async def JoinSession(self, request_iterator, context):
        async for _ in request_iterator:
            yield pb.MemberDirective(drain=pb.Drain(reason="go"))
            if self.error:
                raise self.error


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("call", ["GetJob", "WatchEvents", "JoinSession"])
@pytest.mark.parametrize(
    "error",
    [
        StaleGenerationError("generation 3 is over"),
        UnknownResourceError("no job", reason="JOB_UNKNOWN"),
    ],
    ids=["default reason", "own reason"],
)
def test_error_raised_by_a_handler_reaches_the_caller_unchanged(serve, call, error):
    with serve(Scripted(error)).client(attempts=1) as client, pytest.raises(type(error)) as raised:
        _calls(client)[call]()
    assert (str(raised.value), raised.value.reason) == (str(error), error.reason)


@pytest.mark.parametrize("call", ["GetJob", "WatchEvents", "JoinSession"])
def test_bug_in_a_handler_is_internal_and_logged_without_reaching_the_caller(serve, call, caplog):
    with (
        serve(Scripted(ZeroDivisionError("secret detail"))).client() as client,
        pytest.raises(InternalError) as raised,
    ):
        _calls(client)[call]()
    assert "secret" not in str(raised.value)
    assert any(record.exc_info and "secret" in str(record.exc_info[1]) for record in caplog.records)


def test_caller_that_goes_away_is_counted_but_not_logged_as_an_error(serve, caplog):
    slow = Slow()
    running = serve(slow)
    with running.client() as client:
        result = _in_background(lambda: client.get_job("mnist"))
        assert slow.begun.wait(20)
    assert result()["error"].reason == "CLIENT_CLOSED"
    assert slow.cancelled.wait(20)
    assert running.counted(
        1,
        "grpc_server_handled_total",
        grpc_type="unary",
        grpc_method="GetJob",
        grpc_code="Canceled",
    )
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_unimplemented_methods_are_reported_as_such(serve):
    with serve(Scripted()).client() as client, pytest.raises(ShoalError) as raised:
        client.stop_job("mnist")
    assert raised.value.reason == "UNIMPLEMENTED"


def test_a_request_that_is_not_protobuf_is_an_invalid_argument(serve):
    running = serve(Scripted())
    with grpc.insecure_channel(running.address) as channel:
        unary = channel.unary_unary("/shoal.v1.Coordinator/GetJob")
        stream = channel.stream_stream("/shoal.v1.Coordinator/JoinSession")
        for call in (
            lambda: unary(b"\xff\xff", timeout=20),
            lambda: list(stream(iter([b"\xff\xff"]), timeout=20)),
        ):
            with pytest.raises(grpc.RpcError) as raised:
                call()
            assert raised.value.code().name == InvalidRequestError.code
            assert "cannot parse a message" in raised.value.details()


def test_a_message_over_the_limit_is_resource_exhausted(serve):
    running = serve(Scripted(), max_message_bytes=1000)
    with running.client() as client, pytest.raises(LimitError, match="GetJob at 127"):
        client.get_job("x" * 2000)


# ----------------------------------------------------------------------------------- authentication


@pytest.mark.parametrize("call", ["GetJob", "ListJobs", "WatchEvents", "JoinSession"])
@pytest.mark.parametrize(
    ("token", "refused"),
    [
        (None, {"*": AuthenticationError}),
        ("unknown-t", {"*": AuthenticationError}),
        ("viewer-t", {"ListJobs": PermissionDeniedError, "JoinSession": PermissionDeniedError}),
        ("worker-t", {}),
        ("admin-t", {}),
    ],
)
def test_each_token_may_make_the_calls_of_its_role(serve, call, token, refused):
    with serve(Scripted(), tokens=TOKENS).client(token=token) as client:
        expected = refused.get(call, refused.get("*"))
        if expected is None:
            _calls(client)[call]()
        else:
            with pytest.raises(expected) as raised:
                _calls(client)[call]()
            assert token is None or token not in str(raised.value)


def test_unknown_callers_are_refused_before_their_request_is_decoded(serve):
    running = serve(Scripted(), tokens=TOKENS)
    with grpc.insecure_channel(running.address) as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary("/shoal.v1.Coordinator/GetJob")(b"\xff\xff", timeout=20)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_two_tokens_in_one_call_are_refused(serve):
    running = serve(Scripted(), tokens=TOKENS)
    metadata = (("authorization", "Bearer unknown"), ("authorization", "Bearer admin-t"))
    with grpc.insecure_channel(running.address) as channel, pytest.raises(grpc.RpcError) as raised:
        coordinator_pb2_grpc.CoordinatorStub(channel).GetJob(
            pb.GetJobRequest(), metadata=metadata, timeout=20
        )
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_health_needs_no_token_and_reflection_needs_any(serve):
    running = serve(Scripted(), tokens=TOKENS)
    with grpc.insecure_channel(running.address) as channel:
        assert _health(channel, "shoal.v1.Coordinator") == SERVING
        assert _health(channel, "") == SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.ServerReflectionInfo(iter([request]), timeout=20))
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", "Bearer viewer-t"),)
        (answer,) = stub.ServerReflectionInfo(iter([request]), metadata=metadata, timeout=20)
    assert {service.name for service in answer.list_services_response.service} >= {
        "shoal.v1.Coordinator",
        "grpc.health.v1.Health",
    }


def test_roles_must_be_declared_for_exactly_the_services_methods():
    def server(roles):
        return RpcServer(
            ServerSettings(listen="127.0.0.1:0"),
            service_name="shoal.v1.Coordinator",
            register=lambda server: None,
            allowed_roles=roles,
            metrics_registry=CollectorRegistry(),
        )

    names = [
        f"/shoal.v1.Coordinator/{m.name}"
        for m in pb.DESCRIPTOR.services_by_name["Coordinator"].methods
    ]
    with pytest.raises(ConfigurationError, match=r"is missing /shoal\.v1\.Coordinator/CreateJob"):
        server(dict.fromkeys(names[1:], frozenset()))
    with pytest.raises(ConfigurationError, match=r"does not have: /shoal\.v1\.Coordinator/Typo"):
        server(dict.fromkeys([*names, "/shoal.v1.Coordinator/Typo"], frozenset()))


# ------------------------------------------------------------------------------------------ metrics


def test_calls_are_counted_by_kind_method_and_code(serve):
    running = serve(Scripted())
    with running.client() as client:
        for call in _calls(client).values():
            call()
        with pytest.raises(ShoalError):
            client.stop_job("mnist")
    unary = {"grpc_type": "unary", "grpc_method": "GetJob"}
    stream = {"grpc_type": "bidi_stream", "grpc_method": "JoinSession"}
    events = {"grpc_type": "server_stream", "grpc_method": "WatchEvents"}
    for labels in (unary, stream, events):
        assert running.counted(1, "grpc_server_started_total", **labels)
        assert running.counted(1, "grpc_server_handled_total", **labels, grpc_code="OK")
        assert running.counted(1, "grpc_server_handling_seconds_count", **labels)
        assert running.counted(1, "grpc_server_msg_received_total", **labels)
        assert running.counted(1, "grpc_server_msg_sent_total", **labels)
    assert running.counted(
        1,
        "grpc_server_handled_total",
        grpc_type="unary",
        grpc_method="StopJob",
        grpc_code="Unimplemented",
    )


def test_refused_and_failed_calls_are_counted_with_their_code(serve):
    running = serve(Scripted(StaleGenerationError("old")), tokens=TOKENS)
    for token, code in ((None, "Unauthenticated"), ("worker-t", "FailedPrecondition")):
        with running.client(token=token) as client, pytest.raises(ShoalError):
            client.get_job("mnist")
        labels = {"grpc_type": "unary", "grpc_method": "GetJob"}
        assert running.counted(1, "grpc_server_handled_total", **labels, grpc_code=code)


# -------------------------------------------------------------------------------------------- drain


class Slow(coordinator_pb2_grpc.CoordinatorServicer):
    """Handlers that report when they have begun and end when they are released."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.let_go = asyncio.Event()
        self.cancelled = threading.Event()

    async def GetJob(self, request, context):
        self.begun.set()
        try:
            await self.let_go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return pb.GetJobResponse(now_unix_ms=9)


def _in_background(call):
    """Starts a call on a thread; returns a function that waits for its answer or error."""
    outcome = {}

    def run():
        try:
            outcome["answer"] = call()
        except ShoalError as error:
            outcome["error"] = error

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(30)
        assert not thread.is_alive(), "the call did not end within 30 s"
        return outcome

    return result


def test_a_drain_lets_calls_in_progress_finish_and_refuses_new_ones(serve):
    slow = Slow()
    running = serve(slow, drain_timeout=timedelta(seconds=20))
    with running.client(attempts=1) as client, grpc.insecure_channel(running.address) as watcher:
        states = health_pb2_grpc.HealthStub(watcher).Watch(
            health_pb2.HealthCheckRequest(service=""), timeout=30
        )
        assert next(states).status == SERVING
        result = _in_background(lambda: client.get_job("mnist"))
        assert slow.begun.wait(20)
        drained = asyncio.run_coroutine_threadsafe(running.server.drain_and_stop(), running.loop)
        assert next(states).status == NOT_SERVING
        states.cancel()
        running.run(_wait(running.server.draining))
        with running.client(attempts=1) as late, pytest.raises(UnavailableError):
            late.list_jobs()
        assert not drained.done()
        running.loop.call_soon_threadsafe(slow.let_go.set)
        assert result()["answer"].now_unix_ms == 9
        drained.result(20)


async def _wait(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 20)


def test_drain_cancels_calls_that_outlast_its_timeout(serve):
    slow = Slow()
    running = serve(slow, drain_timeout=timedelta(milliseconds=100))
    with running.client(attempts=1) as client:
        result = _in_background(lambda: client.get_job("mnist"))
        assert slow.begun.wait(20)
        running.run(running.server.drain_and_stop())
        assert isinstance(result()["error"], ShoalError)
    assert slow.cancelled.wait(20)
    labels = {"grpc_type": "unary", "grpc_method": "GetJob"}
    assert running.counted(1, "grpc_server_handled_total", **labels, grpc_code="Canceled")


def test_health_follows_the_state_of_the_service(serve):
    running = serve(Scripted())
    with grpc.insecure_channel(running.address) as channel:
        running.run(running.server.set_serving(False))
        assert _health(channel, "shoal.v1.Coordinator") == NOT_SERVING
        running.run(running.server.set_serving(True))
        assert _health(channel, "shoal.v1.Coordinator") == SERVING


# ---------------------------------------------------------------------------------------- addresses


def test_an_address_in_use_is_one_clear_error(serve):
    running = serve(Scripted())
    with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{running.port}"):
        serve(Scripted(), listen=running.address)


def _health(channel, service):
    return (
        health_pb2_grpc.HealthStub(channel)
        .Check(health_pb2.HealthCheckRequest(service=service), timeout=20)
        .status
    )
