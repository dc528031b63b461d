"""Real servers of scripted services on real sockets, each with an event loop on its own thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from shoal_common.clients import CoordinatorClient
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.rpc.server import RpcServer, ServerSettings
from shoal_common.security.authentication import ANY_ROLE, Role
from shoal_protos.v1 import coordinator_pb2, coordinator_pb2_grpc

COORDINATOR = "shoal.v1.Coordinator"
ROLES = {
    f"/{COORDINATOR}/{method.name}": ANY_ROLE
    if method.name in ("GetJob", "WatchEvents")
    else frozenset({Role.WORKER})
    for method in coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].methods
}


@dataclass
class Running:
    """A server, its event loop, and its metrics."""

    server: RpcServer
    port: int
    loop: asyncio.AbstractEventLoop
    registry: CollectorRegistry

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def settings(self, **more: Any) -> ChannelSettings:
        return ChannelSettings(
            **{"address": self.address, "deadline": timedelta(seconds=60), **more}
        )

    def client(self, **more: Any) -> CoordinatorClient:
        return CoordinatorClient(self.settings(**more))

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def counted(self, expected: float, name: str, **labels: str) -> bool:
        """Returns whether the metric reaches this value within 30 s. The server may count a call
        only after the caller has its answer."""
        deadline = time.monotonic() + 30
        while (
            self.registry.get_sample_value(name, {"grpc_service": COORDINATOR, **labels})
            != expected
        ):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True


@dataclass
class _Loop:
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(
            target=self.loop.run_forever, name="test-server", daemon=True
        )
        self.thread.start()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """serve(servicer, **ServerSettings) -> Running. Services other than the coordinator need
    `register` and `service_name`."""
    loops: list[_Loop] = []
    started: list[Running] = []

    def start(
        servicer: coordinator_pb2_grpc.CoordinatorServicer | None = None,
        *,
        register: Callable[[grpc.aio.Server], None] | None = None,
        service_name: str = COORDINATOR,
        allowed_roles: dict[str, frozenset[Role]] | None = None,
        **settings: Any,
    ) -> Running:
        if register is None:
            scripted = servicer or coordinator_pb2_grpc.CoordinatorServicer()

            def register(server: grpc.aio.Server) -> None:
                coordinator_pb2_grpc.add_CoordinatorServicer_to_server(scripted, server)

        registry = CollectorRegistry()
        server = RpcServer(
            ServerSettings(**{"listen": "127.0.0.1:0", "drain_timeout": timedelta(0), **settings}),
            service_name=service_name,
            register=register,
            allowed_roles=ROLES if allowed_roles is None else allowed_roles,
            metrics_registry=registry,
        )
        background = _Loop()
        loops.append(background)
        port = asyncio.run_coroutine_threadsafe(server.start(), background.loop).result(60)
        running = Running(server, port, background.loop, registry)
        started.append(running)
        return running

    yield start
    for running in started:
        running.run(running.server.drain_and_stop())
    for background in loops:
        background.close()
