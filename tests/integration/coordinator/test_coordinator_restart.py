"""The coordinator dies, is stopped, or is replaced by another one, or Redis is unavailable.
Training continues, and no generation number is used twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from shoal.launcher.processes.ports import ReservedPort
from shoal_common.errors import (
    PreconditionError,
    ShoalError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_common.redis import EmbeddedRedis, connect
from shoal_coordinator.server import serve
from shoal_coordinator.settings import CoordinatorSettings
from shoal_protos.v1 import coordinator_pb2 as pb

from tests.integration.coordinator.harness import (
    Coordinator,
    Job,
    Server,
    create_job,
    eventually,
    ids,
)

MakeCoordinator = Callable[..., Coordinator]


def test_killed_coordinator_returns_and_members_keep_their_places(
    make_coordinator: MakeCoordinator, tmp_path: Path
) -> None:
    coordinator = make_coordinator("--redis", f"embedded://{tmp_path}/data")
    with coordinator.client() as client:
        job = create_job(coordinator, client, smallest=2, largest=3)
        a, b = job.form("a", "b")
        before = a.generation()
        coordinator.kill()
        for member in (a, b):
            assert isinstance(member.end(), UnavailableError)
        coordinator.start()

        a_again, b_again = job.join("a", last=1), job.join("b", last=1)
        for member in (a_again, b_again):
            assert not member.welcome().joining
        held = job.get().generation
        assert (held.number, ids(held)) == (before.number, ids(before))
        c = job.join("c")
        assert c.welcome().joining
        a_again.beat(1)
        b_again.beat(1)
        c.ready()
        for member in (a_again, b_again, c):
            after = member.generation()
            assert (after.number, ids(after)) == (2, ["a", "b", "c"])
        assert a_again.kinds() == ["welcome", "generation"]
        assert [event.kind for event in job.events()].count("generation_formed") == 2
        job.close()


def test_coordinator_whose_embedded_redis_ended_exits_and_its_restart_finds_everything(
    make_coordinator: MakeCoordinator, tmp_path: Path
) -> None:
    coordinator = make_coordinator("--redis", f"embedded://{tmp_path}/data")
    with coordinator.client() as client:
        job = create_job(coordinator, client)
        with connect(coordinator.ports["redis"]) as redis:
            os.kill(redis.info("server")["process_id"], signal.SIGKILL)
        assert coordinator.process.wait() == 1
        assert "shoal-coordinator: the embedded Redis server (pid" in coordinator.log
        coordinator.start()
        assert job.get().spec.job_id == job.job_id


@pytest.mark.parametrize(
    ("listen", "complaint"),
    [("taken", "cannot listen on"), ("0.0.0.0:0", "can be reached from other machines")],
)
def test_coordinator_that_cannot_serve_does_not_take_over_from_a_serving_one(
    make_coordinator: MakeCoordinator, own_redis: EmbeddedRedis, listen: str, complaint: str
) -> None:
    serving = make_coordinator("--redis", own_redis.url)
    address = serving.address if listen == "taken" else listen
    second = make_coordinator("--redis", own_redis.url, "--listen", address, wait=False)
    assert second.process.wait() == 1
    assert complaint in second.log
    with serving.client() as client, connect(own_redis.url) as redis:
        create_job(serving, client)
        assert redis.get("shoal:coordinator:epoch") == b"1"


def test_member_receives_after_a_restart_the_messages_it_missed(
    make_coordinator: MakeCoordinator, own_redis: EmbeddedRedis
) -> None:
    coordinator = make_coordinator("--redis", own_redis.url)
    with coordinator.client() as client:
        job = create_job(coordinator, client, together=2)
        _, b = job.form("a", "b")
        client.drain_member(job.job_id, member_id="b")
        b.received("drain")
        coordinator.kill()
        coordinator.start()
        a_again, b_again = job.join("a", last=1), job.join("b", last=1)
        assert ids(a_again.generation()) == ["a"]
        assert b_again.received("drain").reason == "drained"
        job.close()


def test_interrupted_forming_ends_in_one_generation_for_all(
    make_coordinator: MakeCoordinator, own_redis: EmbeddedRedis
) -> None:
    coordinator = make_coordinator("--redis", own_redis.url)
    with coordinator.client() as client:
        job = create_job(coordinator, client, smallest=2, largest=4, join_grace_ms=300)
        a, _ = job.form("a", "b")
        c, d = job.start("c", "d")
        forming = d.generation(lambda g: "d" in ids(g))
        assert a.generation(lambda g: g.number == forming.number) == forming
        # a has received it, b is slow and c dies; no other member has heard of either.
        a.beat(forming.number)
        coordinator.kill()
        c.kill()
        coordinator.start()

        a_again, b_again, d_again = (
            job.join("a", last=forming.number),
            job.join("b", last=1),
            job.join("d", last=forming.number),
        )
        assert b_again.generation() == forming
        held = job.get().generation
        assert (held.number, ids(held)) == (forming.number, ids(forming))
        assert client.report_exit(job.job_id, "c", exit_code=0, signal=9).was_member
        agreed = b_again.generation(lambda g: "c" not in ids(g))
        assert agreed.number == agreed.interrupts_below == forming.number + 1
        for member in (a_again, d_again):
            assert member.generation() == agreed
            member.beat(agreed.number)
        b_again.beat(agreed.number)
        assert sorted(ids(job.get().generation)) == ["a", "b", "d"]
        job.close()


def test_members_have_a_full_lease_to_return(
    make_coordinator: MakeCoordinator, own_redis: EmbeddedRedis
) -> None:
    coordinator = make_coordinator("--redis", own_redis.url)
    with coordinator.client() as client:
        job = create_job(coordinator, client, together=2, lease_ms=2000)
        job.form("a", "b")
        coordinator.kill()
        coordinator.start()
        a_again = job.join("a", last=1)
        a_again.welcome()
        assert job.phase_of("b") == "ranked"

        def beaten() -> bool:
            a_again.beat(1)
            return job.phase_of("b") == ""

        eventually(beaten, "b's lease to end")
        assert ids(a_again.generation()) == ["a"]
        assert a_again.generation().number == 2
        job.close()


def test_pause_longer_than_a_lease_costs_no_member_its_place(
    make_coordinator: MakeCoordinator, own_redis: EmbeddedRedis
) -> None:
    coordinator = make_coordinator("--redis", own_redis.url)
    with coordinator.client() as client:
        job = create_job(coordinator, client, together=2, lease_ms=1500)
        a, b = job.form("a", "b")
        coordinator.process.kill(signal.SIGSTOP)
        # A plain pause, because its length is the test case: longer than the lease, and than the
        # 1.2 s from which it is reported.
        time.sleep(2.0)
        coordinator.process.kill(signal.SIGCONT)
        for member in (a, b):
            member.beat(1, step=5)
        eventually(
            lambda: [m.progress.step for m in job.get().members] == [5, 5], "both heartbeats"
        )
        assert "this process was suspended for" in coordinator.log
        assert "member_lost" not in [event.kind for event in job.events()]
        job.close()


def test_stopped_coordinator_refers_its_members_to_the_next_one(
    make_coordinator: MakeCoordinator, own_redis: EmbeddedRedis
) -> None:
    coordinator = make_coordinator("--redis", own_redis.url)
    with coordinator.client() as client:
        job = create_job(coordinator, client, together=2)
        a, b = job.form("a", "b")
        assert coordinator.terminate() == 0
        for member in (a, b):
            error = member.end()
            assert isinstance(error, UnavailableError)
            assert error.reason == "COORDINATOR_STOPPING"
        coordinator.start()
        for name in ("a", "b"):
            job.join(name, last=1).welcome()
        assert job.get().generation.number == 1
        assert "member_lost" not in [event.kind for event in job.events()]
        job.close()


def test_second_coordinator_takes_over_and_the_first_one_exits(
    make_coordinator: MakeCoordinator, own_redis: EmbeddedRedis
) -> None:
    first = make_coordinator("--redis", own_redis.url)
    with first.client() as client:
        job = create_job(first, client, together=2)
        a, b = job.form("a", "b")
        second = make_coordinator("--redis", own_redis.url)
        with second.client() as other:
            taken_over = Job(second, other, job.job_id)
            # What the old coordinator still receives can no longer be written.
            b.kill()
            error = a.end()
            assert isinstance(error, UnavailableError)
            assert error.reason == "COORDINATOR_REPLACED"
            eventually(lambda: first.process.status == 1, "the first coordinator to end")
            assert "another coordinator" in first.log
            assert taken_over.get().generation.number == 1
            a_again = taken_over.join("a", last=1)
            b_again = taken_over.join("b", last=1)
            for member in (a_again, b_again):
                member.welcome()
            b_again.kill()
            assert ids(a_again.generation(lambda g: g.number == 2)) == ["a"]
            taken_over.close()


def test_idle_coordinator_notices_a_takeover_too(
    make_coordinator: MakeCoordinator, own_redis: EmbeddedRedis
) -> None:
    first = make_coordinator("--redis", own_redis.url)
    make_coordinator("--redis", own_redis.url)
    eventually(lambda: first.process.status == 1, "the first coordinator to end")


def test_changes_wait_while_redis_is_away_and_none_is_lost(
    make_coordinator: MakeCoordinator, tmp_path: Path
) -> None:
    reserved = ReservedPort()
    redis = EmbeddedRedis(tmp_path / "away", port=reserved.port)
    try:
        coordinator = make_coordinator("--redis", redis.url, "--request-timeout", "1s")
        with coordinator.client(attempts=1) as client:
            job = create_job(coordinator, client, together=3)
            a, b, c = job.form("a", "b", "c")
            redis.close()

            b.kill()
            a.beat(1, step=5)
            eventually(
                lambda: any(m.progress.step == 5 for m in job.get().members),
                "heartbeats and status while Redis is away",
            )
            for change in (
                lambda: client.drain_member(job.job_id, member_id="a"),
                lambda: create_job(coordinator, client),
            ):
                error = refusal(change)
                assert isinstance(error, UnavailableError)
                assert error.reason == "STORAGE_UNAVAILABLE"
            error = job.join("d").end()
            assert isinstance(error, UnavailableError)
            assert a.kinds() == ["welcome", "generation"]
            for _ in range(100):
                c.ready()
            error = c.end()
            assert isinstance(error, UnavailableError)
            assert error.reason == "QUEUE_LIMIT"

            redis = EmbeddedRedis(tmp_path / "away", port=reserved.port)
            a.generation(lambda g: "b" not in ids(g))
            # The drain was requested and not withdrawn: it is carried out, although its caller was
            # told that it may not be.
            assert a.received("drain").reason == "drained"
            # A caller that was asked to retry can do so under the same name.
            job.join("d").welcome()
            job.close()
    finally:
        redis.close()
        reserved.close()


def test_coordinator_with_possibly_outdated_runs_never_reports_a_run_as_over(
    make_coordinator: MakeCoordinator, own_redis: EmbeddedRedis
) -> None:
    """Otherwise a server would discard its data in the middle of a run that only a newer
    coordinator knows."""
    coordinator = make_coordinator("--redis", own_redis.url, "--request-timeout", "1s")
    with coordinator.client(attempts=1) as client, connect(own_redis.url) as redis:
        job = create_job(coordinator, client, together=1, parameter_servers=1)
        (member,) = job.start("a")
        member.generation()
        newer = pb.RunId(number=2, began_unix_ms=redis.time()[0] * 1000)
        refused = Server(job, "s0", run=newer).end()
        assert isinstance(refused, PreconditionError)
        assert refused.reason == "RUN_UNKNOWN"
        process = redis.info("server")["process_id"]
        os.kill(process, signal.SIGSTOP)
        try:
            for error in (Server(job, "s0", run=newer).end(), job.join("b", run=newer).end()):
                assert isinstance(error, UnavailableError)
                assert error.reason == "STORAGE_UNAVAILABLE"
        finally:
            os.kill(process, signal.SIGCONT)
        job.close()


def test_launchers_continue_a_run_that_an_older_release_started(
    make_coordinator: MakeCoordinator, own_redis: EmbeddedRedis
) -> None:
    """The coordinator has no start time for the run."""
    coordinator = make_coordinator("--redis", own_redis.url)
    with coordinator.client() as client, connect(own_redis.url) as redis:
        client.create_job(pb.JobSpec(job_id="j", min_workers=1, max_workers=2))
        coordinator.kill()
        header = json.loads(redis.hget("shoal:{j}:state", "header"))
        for name in ("run", "run_aliases", "past_runs", "run_above", "ended_unix_ms"):
            del header[name]
        redis.hset("shoal:{j}:state", "header", json.dumps({**header, "format": 3}))
        coordinator.start()
    with coordinator.client() as client:
        for number in (1, 2):
            client.run = None
            client.run = client.create_job(pb.JobSpec(job_id="j", min_workers=1, max_workers=2)).run
            assert client.run.number == number
            launchers = client.create_job(
                pb.JobSpec(job_id="j.nodes", min_workers=1, max_workers=2), follow=True
            )
            assert launchers.run.number == number
            client.stop_job("j")


def test_a_redis_that_lost_everything_is_filled_again_from_memory(
    make_coordinator: MakeCoordinator, own_redis: EmbeddedRedis
) -> None:
    import redis

    coordinator = make_coordinator("--redis", own_redis.url)
    with coordinator.client() as client, redis.Redis.from_url(own_redis.url) as raw:
        job = create_job(coordinator, client, together=2)
        a, b = job.form("a", "b")
        raw.flushall()
        b.kill()
        assert ids(a.generation(lambda g: g.number == 2)) == ["a"]
        coordinator.kill()
        coordinator.start()
        job.join("a", last=2).welcome()
        assert job.get().generation.number == 2
        job.close()


def test_coordinator_waits_for_redis_at_startup(
    make_coordinator: MakeCoordinator, tmp_path: Path
) -> None:
    with ReservedPort() as reserved:
        coordinator = make_coordinator("--redis", f"redis://127.0.0.1:{reserved.port}", wait=False)
        eventually(lambda: "waiting for Redis" in coordinator.log, "the first attempt")
        with EmbeddedRedis(tmp_path / "late", port=reserved.port):
            coordinator.wait_ready()
            coordinator.close()


def refusal(call: Callable[[], object]) -> ShoalError:
    """Returns the error that `call` raises."""
    try:
        call()
    except ShoalError as error:
        return error
    raise AssertionError("the call was granted")


def test_coordinator_that_waits_for_a_silent_redis_stops_on_request() -> None:
    """The coordinator stops before it would give up on Redis, which takes 5 s for each of two
    attempts."""

    async def test() -> None:
        stop = asyncio.Event()
        with socket.create_server(("127.0.0.1", 0)) as mute:
            mute.setblocking(False)
            serving = asyncio.create_task(
                serve(CoordinatorSettings(), f"redis://127.0.0.1:{mute.getsockname()[1]}", stop)
            )
            asked, _ = await asyncio.get_running_loop().sock_accept(mute)
            stop.set()
            with asked:
                async with asyncio.timeout(9):
                    await serving

    asyncio.run(test())


def test_job_survives_a_restart_with_its_spec_and_closed_state(
    make_coordinator: MakeCoordinator, own_redis: EmbeddedRedis
) -> None:
    coordinator = make_coordinator("--redis", own_redis.url)
    with coordinator.client() as client:
        job = create_job(coordinator, client, smallest=2, largest=3)
        client.stop_job(job.job_id, reason="done")
        before = job.get()
        coordinator.kill()
        coordinator.start()
        after = job.get()
        assert (after.spec, after.phase) == (before.spec, pb.JOB_PHASE_FINISHED)
        assert [summary.job_id for summary in client.list_jobs().jobs] == [job.job_id]


def test_job_without_members_is_forgotten_after_the_retention(
    make_coordinator: MakeCoordinator, own_redis: EmbeddedRedis
) -> None:
    import redis

    coordinator = make_coordinator("--redis", own_redis.url, "--job-retention", "2s")
    with coordinator.client() as client, redis.Redis.from_url(own_redis.url) as raw:
        occupied, finished = create_job(coordinator, client), create_job(coordinator, client)
        occupied.form("a")
        (b,) = finished.form("b")
        b.leave(pb.Leave.REASON_FINISHED)
        assert b.end() is None
        assert finished.get().phase == pb.JOB_PHASE_FINISHED
        followed = client.watch_events(finished.job_id, follow=True)
        error = refusal(lambda: list(followed))
        assert isinstance(error, UnknownResourceError)
        assert error.reason == "JOB_UNKNOWN"
        assert [summary.job_id for summary in client.list_jobs().jobs] == [occupied.job_id]
        assert not raw.keys(f"*{finished.job_id}*")
        assert raw.smembers("shoal:jobs") == {occupied.job_id.encode()}
        assert occupied.get().phase == pb.JOB_PHASE_RUNNING
        # The id is free again.
        assert client.create_job(
            pb.JobSpec(job_id=finished.job_id, min_workers=1, max_workers=7)
        ).created
        occupied.close()


def test_job_expired_while_no_coordinator_runs_is_not_restored(
    make_coordinator: MakeCoordinator, own_redis: EmbeddedRedis
) -> None:
    import redis

    coordinator = make_coordinator("--redis", own_redis.url, "--job-retention", "1s")
    with coordinator.client() as client, redis.Redis.from_url(own_redis.url) as raw:
        create_job(coordinator, client)
        coordinator.kill()
        eventually(lambda: not raw.keys("shoal:{*"), "Redis to drop the job")
        coordinator.start()
        assert list(client.list_jobs().jobs) == []
        assert raw.smembers("shoal:jobs") == set()
