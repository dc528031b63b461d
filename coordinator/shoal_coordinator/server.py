"""Runs one coordinator: creates its components, serves until it is stopped, and shuts the
components down in order."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from prometheus_client import CollectorRegistry
from shoal_common.errors import ShoalError, UnavailableError
from shoal_common.rpc.server import RpcServer, ServerSettings
from shoal_common.settings import Address
from shoal_common.tasks import end_tasks
from shoal_common.telemetry.http import HttpRequest, HttpResponse, HttpServer, serve_metrics
from shoal_common.telemetry.loop_watch import LoopWatch

from shoal_coordinator.membership.model.reasons import Refusal
from shoal_coordinator.membership.model.spec import Policy
from shoal_coordinator.metrics import CoordinatorMetrics, JobsCollector
from shoal_coordinator.page.routes import OF_ONE_JOB, PAGE, StatusPage
from shoal_coordinator.service.clock import Clock
from shoal_coordinator.service.discovery import targets
from shoal_coordinator.service.jobs import Jobs
from shoal_coordinator.service.member_sessions import MemberSessions
from shoal_coordinator.service.methods import ALLOWED_ROLES, SERVICE, register
from shoal_coordinator.service.server_sessions import ServerSessions
from shoal_coordinator.service.servicer import CoordinatorServicer
from shoal_coordinator.settings import CoordinatorSettings
from shoal_coordinator.state.store import JobStore

logger = logging.getLogger(__name__)

_REDIS_RETRY_S = 0.2


async def serve(settings: CoordinatorSettings, redis_url: str, stop: asyncio.Event) -> None:
    """Serves until `stop` is set. Raises FencedError if a newer coordinator takes over, and a
    different ShoalError if this coordinator cannot start."""
    server_settings = _servable(settings)
    async with AsyncExitStack() as stack:
        registry = CollectorRegistry()
        stack.callback(LoopWatch("the coordinator", registry).close)
        store = await _open_store(redis_url, settings, stop)
        if store is None:
            return
        stack.push_async_callback(store.close)
        metrics = CoordinatorMetrics(registry)
        clock = Clock(await store.now_unix_ms())
        jobs = Jobs(
            store, clock=clock, policy=Policy(), metrics=metrics, retention=settings.job_retention
        )
        registry.register(JobsCollector(jobs.observed))
        stack.push_async_callback(jobs.close, _stopping())
        await jobs.load()
        servicer = _servicer(settings, jobs, store, clock, metrics, redis_url)
        rpc = RpcServer(
            server_settings,
            service_name=SERVICE,
            register=partial(register, servicer),
            allowed_roles=ALLOWED_ROLES,
            metrics_registry=registry,
        )
        page = StatusPage(jobs, store, timeout_s=settings.request_timeout.total_seconds())
        following = asyncio.create_task(page.histories.follow(), name="histories")
        stack.push_async_callback(end_tasks, [following])
        http = serve_metrics(
            str(settings.http),
            registry,
            routes={"/sd": partial(_discover, jobs), **page.routes},
            unhealthy=partial(_unhealthy, jobs),
            tokens=settings.token_table,
            without_token={PAGE},
            checking_job=OF_ONE_JOB,
        )
        stack.callback(http.close)
        port = await rpc.start()
        stack.push_async_callback(rpc.drain_and_stop)
        # Closes all sessions before the server waits for open calls, since sessions would use up
        # its grace period.
        stack.push_async_callback(jobs.close, _stopping())
        _write_port_file(settings, port, http, redis_url)
        await _until_stopped(stop, jobs)


async def _until_stopped(stop: asyncio.Event, jobs: Jobs) -> None:
    """Waits until `stop` is set. If this coordinator cannot continue because of an error, raises
    that error."""
    jobs.failed.add_done_callback(lambda _: stop.set())
    await stop.wait()
    if jobs.failed.done():
        raise jobs.failed.result()


async def _open_store(
    url: str, settings: CoordinatorSettings, stop: asyncio.Event
) -> JobStore | None:
    """Opens the store, waiting up to `redis_patience` for Redis to respond. Returns None if `stop`
    is set first."""
    opening = asyncio.create_task(_opened_store(url, settings))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((opening, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not opening.done():
        await end_tasks([opening])
    return None if opening.cancelled() else opening.result()


async def _opened_store(url: str, settings: CoordinatorSettings) -> JobStore:
    deadline = asyncio.get_running_loop().time() + settings.redis_patience.total_seconds()
    while True:
        try:
            return await JobStore.open(url, retention=settings.job_retention)
        except UnavailableError as error:
            if asyncio.get_running_loop().time() >= deadline:
                raise
            logger.warning("waiting for Redis: %s", error)
        await asyncio.sleep(_REDIS_RETRY_S)


def _servicer(
    settings: CoordinatorSettings,
    jobs: Jobs,
    store: JobStore,
    clock: Clock,
    metrics: CoordinatorMetrics,
    redis_url: str,
) -> CoordinatorServicer:
    members = MemberSessions(
        jobs,
        clock=clock,
        metrics=metrics,
        store_url=settings.store_url
        or (redis_url if settings.share_store_credentials else _without_credentials(redis_url)),
        reconnect_grace=settings.reconnect_grace,
        request_timeout=settings.request_timeout,
    )
    servers = ServerSessions(
        jobs, clock=clock, metrics=metrics, request_timeout=settings.request_timeout
    )
    return CoordinatorServicer(
        jobs,
        store=store,
        clock=clock,
        members=members,
        servers=servers,
        request_timeout=settings.request_timeout,
    )


def _servable(settings: CoordinatorSettings) -> ServerSettings:
    """Returns the settings of the gRPC server. Raises ConfigurationError if they are unusable.

    Must be called before the store is opened, because opening the store takes over from a running
    coordinator.
    """
    for address in (settings.listen, settings.http):
        address.check_free()
    if (tls := settings.serving_tls) is not None:
        tls.load()
    return ServerSettings(
        listen=str(settings.listen),
        tls=tls,
        tokens=settings.token_table,
        insecure=settings.insecure,
        drain_timeout=settings.drain_timeout,
    )


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _discover(jobs: Jobs, request: HttpRequest) -> HttpResponse:
    return HttpResponse.json(targets(jobs.states()))


def _unhealthy(jobs: Jobs) -> str | None:
    """Returns the reason why the coordinator is unhealthy; None if it is healthy. A coordinator
    that cannot reach Redis counts as healthy, because restarting it would not help and would lose
    its in-memory state."""
    return (
        str(jobs.failed.result()) if jobs.failed.done() else ("stopping" if jobs.closing else None)
    )


def _stopping() -> ShoalError:
    return UnavailableError(
        "this coordinator is shutting down; reconnect", reason=Refusal.COORDINATOR_STOPPING
    )


def _write_port_file(
    settings: CoordinatorSettings, port: int, http: HttpServer, redis_url: str
) -> None:
    """Writes the port file under a temporary name and renames it, so that readers never see an
    incomplete file."""
    if settings.port_file is None:
        return
    content = {
        "grpc": str(Address(settings.listen.host, port)),
        "http": str(Address(settings.http.host, http.port)),
        "redis": _without_credentials(redis_url),
        "pid": os.getpid(),
    }
    temporary = Path(f"{settings.port_file}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
    temporary.rename(settings.port_file)
