"""Every RPC of both services has a client method and a decision about retries, and reaches the
stub."""

from __future__ import annotations

import inspect
import json
import re
from datetime import timedelta

import pytest
from shoal_common.clients import CoordinatorClient, ParameterServerClient
from shoal_common.rpc.idempotence import IDEMPOTENT, NOT_REPEATED, service_config
from shoal_protos.v1 import coordinator_pb2, parameter_server_pb2

SERVICES = {
    CoordinatorClient: coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"],
    ParameterServerClient: parameter_server_pb2.DESCRIPTOR.services_by_name["ParameterServer"],
}
BETWEEN_SERVERS = {"Follow", "TakePartitions"}
"""RPCs that no client calls."""
METHODS = [
    (client, method)
    for client, service in SERVICES.items()
    for method in service.methods
    if method.name not in BETWEEN_SERVERS
]


def snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def test_every_rpc_has_a_client_method_of_its_name_with_a_deadline(
    subtests: pytest.Subtests,
) -> None:
    sessions = {"JoinSession", "ServerSession"}
    for client, method in METHODS:
        with subtests.test(method.full_name):
            function = getattr(client, snake_case(method.name))
            has_deadline = "deadline" in inspect.signature(function).parameters
            assert has_deadline == (method.name not in sessions)


def test_clients_have_no_method_without_an_rpc():
    for client, service in SERVICES.items():
        public = {
            name
            for name, _ in inspect.getmembers(client, inspect.isfunction)
            if not name.startswith("_")
        }
        offered = public - {"answers", "close", "find_obstacle"}
        assert offered == {
            snake_case(method.name)
            for method in service.methods
            if method.name not in BETWEEN_SERVERS
        }


def test_every_rpc_is_declared_retryable_or_not():
    for service in SERVICES.values():
        repeated, not_repeated = IDEMPOTENT[service.full_name], NOT_REPEATED[service.full_name]
        assert not repeated & not_repeated
        assert repeated | not_repeated == {method.name for method in service.methods}


def test_request_streams_are_never_retried_by_grpc():
    for service in SERVICES.values():
        for method in service.methods:
            assert not (method.client_streaming and method.name in IDEMPOTENT[service.full_name])


def test_service_config_retries_only_on_unavailable():
    config = json.loads(
        service_config(
            attempts=3,
            first_backoff=timedelta(milliseconds=50),
            longest_backoff=timedelta(seconds=1),
        )
    )
    (entry,) = config["methodConfig"]
    assert entry["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]
    assert entry["retryPolicy"]["initialBackoff"] == "0.050s"
    assert {"service": "shoal.v1.Coordinator", "method": "GetJob"} in entry["name"]
    assert all("method" in name for name in entry["name"])
