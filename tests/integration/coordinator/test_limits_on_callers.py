"""Everything in a coordinator that callers can enlarge has a limit, and a caller that reaches the
limit gets an error with a remedy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from shoal.launcher.processes.ports import ReservedPort
from shoal_common.errors import LimitError, UnavailableError
from shoal_common.redis import EmbeddedRedis
from shoal_coordinator.membership.model.events import RunWanted
from shoal_coordinator.membership.model.spec import JobSpec, Policy
from shoal_coordinator.metrics import CoordinatorMetrics
from shoal_coordinator.service import jobs as jobs_module
from shoal_coordinator.service.clock import Clock
from shoal_coordinator.service.jobs import Jobs
from shoal_coordinator.state.store import JobStore
from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_protos.v1.coordinator_pb2_grpc import CoordinatorStub

from tests.integration.coordinator.harness import Coordinator, Job, Server, create_job
from tests.zygote.children import eventually

MakeJob = Callable[..., Job]
MOST_WATCHERS = 1_000
MOST_BATCHES = 65_536
MOST_WANTED = 1_024


def test_jobs(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "_MOST_JOBS", 2)

    async def test() -> None:
        store = await JobStore.open(redis_url)
        metrics = CoordinatorMetrics(CollectorRegistry())
        jobs = Jobs(
            store,
            clock=Clock(await store.now_unix_ms()),
            policy=Policy(),
            metrics=metrics,
            retention=timedelta(hours=3),
        )

        async def create(job_id: str) -> bool:
            return (
                await jobs.create(
                    RunWanted(spec=JobSpec(job_id=job_id, min_workers=1, max_workers=1)),
                    timeout_s=30,
                )
            )[0]

        try:
            assert [await create("a"), await create("b"), await create("a")] == [True, True, False]
            with pytest.raises(
                LimitError,
                match=r"already has 2 jobs.*2 of them have no members.*3:00:00.*--job-retention",
            ) as refused:
                await create("c")
            assert refused.value.reason == "JOBS_LIMIT"
            assert await store.claim("c") is None
        finally:
            await jobs.close(UnavailableError("the test is over"))
            await store.close()

    asyncio.run(test())


def test_followers_of_a_jobs_events_are_limited(
    make_job: MakeJob, shared_coordinator: Coordinator
) -> None:
    job = make_job()
    request = pb.WatchEventsRequest(job_id=job.job_id, follow=True)
    with grpc.insecure_channel(shared_coordinator.address) as channel:
        stub = CoordinatorStub(channel)

        @contextmanager
        def followed() -> Iterator[str]:
            """Returns the kind of the first event."""
            call = stub.WatchEvents(request, timeout=60)
            try:
                yield next(call).kind
            finally:
                call.cancel()

        with ExitStack() as all_of_them:
            assert {all_of_them.enter_context(followed()) for _ in range(MOST_WATCHERS)} == {
                "job_created"
            }
            with pytest.raises(grpc.RpcError) as refused, followed():
                pass
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (
                f"job {job.job_id} already has {MOST_WATCHERS} callers following its events"
                in refused.value.details()
            )
            assert [event.kind for event in job.events()] == ["job_created"], (
                "who does not follow is answered"
            )

        def has_room() -> bool:
            try:
                with followed():
                    return True
            except grpc.RpcError:
                return False

        eventually(has_room, "room for another one, now that all have gone")


def test_batches_of_a_member(make_job: MakeJob) -> None:
    job = make_job(together=1)
    job.form("a")

    def lease(want: int, finished: tuple[int, ...] = ()) -> list[int]:
        return list(
            job.client.lease_batches(
                job.job_id,
                "a",
                loader="l",
                epoch=0,
                batches_in_epoch=1 << 40,
                want=want,
                finished=finished,
            ).batches
        )

    held = [batch for _ in range(MOST_BATCHES // MOST_WANTED) for batch in lease(MOST_WANTED)]
    assert held == list(range(MOST_BATCHES))
    with pytest.raises(
        LimitError,
        match=r"already has 65536 batches of epoch 0 of loader 'l'.*report the finished ones",
    ) as refused:
        lease(1)
    assert refused.value.reason == "BATCHES_LIMIT"
    with pytest.raises(LimitError):
        lease(2, (0,))
    assert lease(1, (0,)) == [MOST_BATCHES], "what was refused has finished nothing"


def test_server_reports_are_limited_while_redis_is_away(
    make_coordinator: Callable[..., Coordinator], make_server: Callable[..., Server], tmp_path: Path
) -> None:
    reserved = ReservedPort()
    redis = EmbeddedRedis(tmp_path / "away", port=reserved.port)
    try:
        coordinator = make_coordinator("--redis", redis.url)
        with coordinator.client(attempts=1) as client:
            job = create_job(coordinator, client, parameter_servers=1)
            server = make_server(job, "s0")
            server.received("welcome")
            redis.close()
            job.join("a")  # it is written before the messages after it are processed

            def is_refused() -> bool:
                server.report(1, reason="a test")
                return server.ended

            eventually(is_refused, "the end of a session that says too much")
            error: Any = server.end()
            assert isinstance(error, UnavailableError)
            assert error.reason == "QUEUE_LIMIT"
            job.close()
    finally:
        redis.close()
        reserved.close()
