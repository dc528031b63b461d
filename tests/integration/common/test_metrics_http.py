"""The HTTP server beside every service."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families
from shoal_common.errors import ConfigurationError, PreconditionError, UnavailableError
from shoal_common.security.authentication import TokenTable
from shoal_common.telemetry import HttpResponse, serve_metrics
from shoal_common.telemetry import http as http_module


@pytest.fixture
def registry():
    made = CollectorRegistry()
    Counter("shoal_demo", "Demo.", registry=made).inc(3)
    return made


def get(server, path, **headers):
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode(), response.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers["Content-Type"]


def test_metrics_are_readable_by_prometheus(registry):
    with serve_metrics("127.0.0.1:0", registry) as server:
        status, body, content_type = get(server, "/metrics")
        assert (status, content_type.split(";")[0]) == (200, "text/plain")
        samples = {
            sample.name: sample.value
            for family in text_string_to_metric_families(body)
            for sample in family.samples
        }
        assert samples["shoal_demo_total"] == 3
        assert (
            "# EOF"
            in get(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")[1]
        )


def test_unhealthy_service_reports_the_reason(registry):
    reasons = iter([None, "Redis does not answer"])
    with serve_metrics("127.0.0.1:0", registry, unhealthy=lambda: next(reasons)) as server:
        assert get(server, "/healthz")[:2] == (200, "ok\n")
        assert get(server, "/healthz")[:2] == (503, "Redis does not answer\n")


def test_routes_of_a_service_receive_the_query_and_answer_json(registry):
    routes = {"/sd": lambda request: HttpResponse.json([{"targets": [request.query["job"]]}])}
    with serve_metrics("127.0.0.1:0", registry, routes=routes) as server:
        status, body, content_type = get(server, "/sd?job=mnist")
        assert (status, json.loads(body), content_type) == (
            200,
            [{"targets": ["mnist"]}],
            "application/json",
        )


def test_unknown_pages_list_the_known_ones(registry):
    with serve_metrics("127.0.0.1:0", registry) as server:
        assert get(server, "/nothing") == (
            404,
            "no such page; available pages: /healthz, /metrics\n",
            "text/plain; charset=utf-8",
        )


def test_failing_routes_answer_with_the_right_status_and_hide_bugs(registry, caplog):
    def raising(error):
        def route(request):
            raise error

        return route

    routes = {
        "/away": raising(UnavailableError("Redis is away")),
        "/known": raising(PreconditionError("no job")),
        "/bug": raising(ZeroDivisionError("secret")),
    }
    with serve_metrics("127.0.0.1:0", registry, routes=routes) as server:
        assert get(server, "/away")[:2] == (503, "Redis is away\n")
        assert get(server, "/known")[:2] == (500, "/known failed: no job\n")
        assert get(server, "/bug")[:2] == (
            500,
            "/bug failed: ZeroDivisionError; see the log\n",
        )


def test_tokens_are_required_except_for_health(registry):
    with serve_metrics("127.0.0.1:0", registry, tokens=TokenTable({"t": "viewer"})) as server:
        assert get(server, "/metrics")[0] == 401
        assert get(server, "/metrics", Authorization="Bearer x")[0] == 401
        assert get(server, "/metrics", Authorization="Bearer t")[0] == 200
        assert get(server, "/healthz")[0] == 200
    with serve_metrics("127.0.0.1:0", registry, tokens=TokenTable.open()) as server:
        assert get(server, "/metrics")[0] == 200


def test_slow_route_does_not_delay_the_others(registry):
    entered, release = threading.Event(), threading.Event()

    def slow(request):
        entered.set()
        assert release.wait(20)
        return HttpResponse.text("slow")

    with serve_metrics("127.0.0.1:0", registry, routes={"/slow": slow}) as server:
        caller = threading.Thread(target=get, args=(server, "/slow"))
        caller.start()
        assert entered.wait(10)
        assert get(server, "/healthz")[0] == 200
        release.set()
        caller.join(10)
        assert not caller.is_alive()


def test_other_methods_and_garbage_are_refused_without_harm(registry):
    with serve_metrics("127.0.0.1:0", registry) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("POST", "/metrics", body=b"x")
        assert connection.getresponse().status == 501
        connection.close()
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
            raw.sendall(b"\xff\xfe garbage\r\n\r\n")
            with raw.makefile("rb") as answer:
                assert b"400" in answer.read()
        assert get(server, "/healthz")[0] == 200


def test_an_address_in_use_is_one_clear_error_and_closing_frees_it(registry):
    server = serve_metrics("127.0.0.1:0", registry)
    address = server.address
    with pytest.raises(ConfigurationError, match=f"cannot listen on {address}"):
        serve_metrics(address, registry)
    server.close()
    server.close()
    with serve_metrics(address, registry) as again:
        assert again.address == address


def test_ipv6_works_where_it_is_available(registry):
    try:
        server = serve_metrics("[::1]:0", registry)
    except ConfigurationError:
        pytest.skip("no IPv6 loopback on this machine")
    with server:
        assert server.address == f"[::1]:{server.port}"


@pytest.mark.slow
def test_clients_that_never_finish_a_request_do_not_block_others(registry):
    before = threading.active_count()
    with serve_metrics("127.0.0.1:0", registry) as server, contextlib.ExitStack() as slow:
        connections = [
            slow.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(300)
        ]
        assert get(server, "/metrics")[0] == 200
        for connection in connections[:200]:
            connection.settimeout(10)
            assert connection.recv(1) == b"", "the longest open ones are hung up on"
        assert threading.active_count() - before < 300


def test_number_of_slow_requests_is_limited(registry, monkeypatch):
    monkeypatch.setattr(http_module, "_MOST_SERVED", 3)
    answered, asked = threading.Event(), threading.Semaphore(0)

    def route(request):
        asked.release()
        answered.wait(60)
        return HttpResponse.text("at last")

    with (
        serve_metrics("127.0.0.1:0", registry, routes={"/slow": route}) as server,
        ThreadPoolExecutor(3) as callers,
    ):
        waiting = [callers.submit(get, server, "/slow") for _ in range(3)]
        for _ in waiting:
            assert asked.acquire(timeout=60)
        with pytest.raises((ConnectionError, http.client.HTTPException, urllib.error.URLError)):
            get(server, "/metrics")
        answered.set()
        assert [each.result()[:2] for each in waiting] == [(200, "at last\n")] * 3
        # A thread ends shortly after it has sent its answer.
        for _ in range(1000):
            with contextlib.suppress(
                ConnectionError, http.client.HTTPException, urllib.error.URLError
            ):
                assert get(server, "/metrics")[0] == 200
                break
        else:
            raise AssertionError("those that were answered still take up the room")


def test_a_burst_of_connections_waits_without_losing_a_packet():
    server = http_module._BoundedServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    with contextlib.closing(server.socket), contextlib.ExitStack() as connections:
        for _ in range(100):  # no thread accepts them
            connections.enter_context(socket.create_connection(server.server_address, timeout=5))
