"""Members with real streams: joining, dying, leaving, draining, stopping. The unit scenarios cover
the decisions in detail."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

from shoal_common.errors import PreconditionError, StaleGenerationError
from shoal_common.redis import EmbeddedRedis
from shoal_protos.v1 import coordinator_pb2 as pb

from tests.integration.coordinator.harness import (
    DONOR_KEY,
    Coordinator,
    Job,
    create_job,
    eventually,
    ids,
)

MakeJob = Callable[..., Job]


def endings(job: Job) -> list[tuple[str, str]]:
    """Returns the members that were lost, and how each was lost."""
    return [
        (event.member_id, event.attributes["ending"])
        for event in job.events()
        if event.kind == "member_lost"
    ]


def test_generation_forms_when_the_world_is_full_with_ranks_ordered_by_host(
    make_job: MakeJob,
) -> None:
    job = make_job(smallest=2, largest=3, join_grace_ms=60_000)
    c = job.join("c", host="h2")
    b = job.join("b", host="h1", index=1)
    a = job.join("a", host="h1", index=0)
    welcome = a.welcome()
    assert not welcome.joining
    assert welcome.store_url == job.coordinator.ports["redis"]
    assert welcome.heartbeat_interval_ms == 1000
    assert welcome.spec.max_workers == 3
    for member in (c, b, a):
        member.welcome()
        member.ready()
    generation = a.generation()
    assert generation == b.generation() == c.generation()
    assert generation.number == 1
    assert generation.cause == pb.Generation.CAUSE_START
    assert len(generation.nonce) == 32
    assert [
        (r.rank, r.member_id, r.host, r.local_rank, r.local_world_size) for r in generation.ranks
    ] == [
        (0, "a", "h1", 0, 2),
        (1, "b", "h1", 1, 2),
        (2, "c", "h2", 0, 1),
    ]
    status = job.get()
    assert status.phase == pb.JOB_PHASE_RUNNING
    assert {rank.donor_key for rank in generation.ranks} == {DONOR_KEY}
    # Permission to look at the job does not include permission to fetch its members' state.
    assert not status.generation.nonce
    assert DONOR_KEY not in str(status)
    assert [rank.member_id for rank in status.generation.ranks] == ["a", "b", "c"]
    assert [(m.member_id, m.rank) for m in status.members] == [("a", 0), ("b", 1), ("c", 2)]


def test_grace_period_gathers_members_that_arrive_a_little_later(make_job: MakeJob) -> None:
    job = make_job(together=2)
    (a,) = job.start("a")
    eventually(lambda: job.phase_of("a") == "ready", "a to be ready, which alone would do")
    assert job.get().generation.number == 0
    (b,) = job.start("b")
    assert ids(a.generation()) == ["a", "b"]
    assert b.generation().number == 1


def test_job_starts_with_the_present_members_when_the_grace_is_over(make_job: MakeJob) -> None:
    (a,) = make_job(join_grace_ms=100).start("a")
    assert ids(a.generation()) == ["a"]


def test_members_below_the_minimum_wait(make_job: MakeJob) -> None:
    job = make_job(smallest=2)
    (a,) = job.start("a")
    assert a.received("standby").reason == "waiting for 2 members: 1 ready"
    assert job.get().phase == pb.JOB_PHASE_WAITING
    job.start("b")
    assert ids(a.generation()) == ["a", "b"]


def test_a_broken_stream_shrinks_the_world_at_once(make_job: MakeJob) -> None:
    job = make_job(together=3)
    a, b, c = job.form("a", "b", "c")
    b.kill()
    generation = a.generation(lambda g: g.number == 2)
    assert ids(generation) == ["a", "c"]
    assert [job.client.get_job(job.job_id, member_id=name).member_put_out for name in "abc"] == [
        False,
        True,
        False,
    ]
    assert generation.cause == pb.Generation.CAUSE_FAILURE
    assert generation.interrupts_below == 2
    assert c.generation(lambda g: g.number == 2) == generation
    back = job.join("b", last=1)
    error = back.end()
    assert isinstance(error, PreconditionError)
    assert error.reason == "MEMBER_REPLACED"


def test_sigkill_of_a_member_process_is_noticed_by_its_stream(make_job: MakeJob) -> None:
    job = make_job(smallest=1, largest=2)
    script = """
        import sys, threading
        from shoal_common.clients import CoordinatorClient
        from shoal_common.rpc.channel import ChannelSettings
        from shoal_protos.v1 import coordinator_pb2 as pb


        def messages():
            yield pb.MemberMessage(
                join=pb.Join(job_id=sys.argv[2], member_id="victim", host="h1", pid=1)
            )
            yield pb.MemberMessage(ready=pb.Ready())
            threading.Event().wait()


        for directive in CoordinatorClient(ChannelSettings(address=sys.argv[1])).join_session(
            messages()
        ):
            pass
    """
    (a,) = job.form("a")
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), job.coordinator.ports["grpc"], job.job_id]
    ) as victim:
        try:
            joined = a.generation(lambda g: "victim" in ids(g))
            a.beat(joined.number)
        finally:
            victim.kill()
    shrunk = a.generation(lambda g: g.number > joined.number)
    assert ids(shrunk) == ["a"]
    assert endings(job) == [("victim", "stream_broken")]


def test_joiner_is_admitted_at_the_step_boundary_and_interrupts_nobody(make_job: MakeJob) -> None:
    job = make_job()
    (a,) = job.form("a")
    b = job.join("b")
    assert b.welcome().joining
    b.ready()
    generation = b.generation()
    assert (generation.number, generation.cause, generation.interrupts_below) == (
        2,
        pb.Generation.CAUSE_BORDER,
        1,
    )
    assert [rank.joining for rank in generation.ranks] == [False, True]
    assert a.generation(lambda g: g.number == 2) == generation


def test_drained_member_leaves_and_the_others_continue(make_job: MakeJob) -> None:
    job = make_job(together=2)
    a, b = job.form("a", "b")
    assert job.client.drain_member(job.job_id, rank=1, reason="the host goes down").member_id == "b"
    assert b.received("drain").reason == "the host goes down"
    generation = a.generation(lambda g: g.number == 2)
    assert generation.cause == pb.Generation.CAUSE_BORDER
    assert ids(generation) == ["a"]
    assert job.phase_of("b") == "draining"
    b.leave(pb.Leave.REASON_DRAINED)
    assert b.end() is None
    a.beat(2)
    eventually(lambda: job.phase_of("b") == "", "b to be gone")
    assert job.get().generation.number == 2
    assert not job.client.get_job(job.job_id, member_id="b").member_put_out


def test_a_reported_exit_shrinks_the_world_and_ends_the_session(make_job: MakeJob) -> None:
    job = make_job(together=2)
    a, b = job.form("a", "b")
    assert job.client.report_exit(job.job_id, "b", exit_code=137, signal=9).was_member
    assert ids(a.generation(lambda g: g.number == 2)) == ["a"]
    error = b.end()
    assert error is not None
    assert error.reason == "PROCESS_EXITED"
    assert job.client.report_exit(job.job_id, "b", exit_code=137, signal=9).was_member
    assert not job.client.report_exit(job.job_id, "stranger", exit_code=1).was_member


def test_a_member_without_heartbeats_that_its_peers_wait_for_loses_its_lease(
    make_job: MakeJob,
) -> None:
    job = make_job(together=2, lease_ms=1500)
    a, b = job.form("a", "b")
    began = time.monotonic()

    def beaten() -> bool:
        a.beat(1, waiting_s=time.monotonic() - began, waiting_in="all_reduce")
        return b.ended

    eventually(beaten, "b's lease to end")
    assert b.error is not None
    assert b.error.reason == "LEASE_EXPIRED"
    assert ids(a.generation(lambda g: g.number == 2)) == ["a"]


def test_member_cut_off_from_the_coordinator_while_training_with_its_peers_keeps_its_place(
    make_job: MakeJob,
) -> None:
    job = make_job(together=2, lease_ms=1000)
    a, b = job.form("a", "b")
    began = time.monotonic()

    def silent() -> bool:
        a.beat(1, sequence=int(10 * (time.monotonic() - began)))
        return "no heartbeat for" in next(
            (m.note for m in job.get().members if m.member_id == "b"), "not there"
        )

    eventually(silent, "several leases to end")
    assert not b.ended
    assert job.get().generation.number == 1
    b.beat(1)
    eventually(lambda: not any(m.note for m in job.get().members), "it to be heard of again")


def test_stalled_step_is_explained_to_the_waiting_members(make_job: MakeJob) -> None:
    job = make_job(together=2)
    a, b = job.form("a", "b")
    a.beat(1, waiting_s=11, waiting_in="all_reduce", step=3)
    b.beat(1, step=3)
    text = a.received("notice").text
    assert (
        "generation 1 has stalled at step 3: rank 0 (h1) has waited 11 s in all_reduce for "
        "rank 1 (h1)" in text
    )
    assert b.received("notice").text == text
    assert job.get().waits_for == text
    assert [e.attributes["reason"] for e in job.events() if e.kind == "step_stands"] == [text]
    a.beat(1, sequence=4)
    assert a.received("notice", lambda notice: not notice.text) is not None
    assert not job.get().waits_for


def test_failed_collective_without_a_death_forms_a_new_generation_of_all(make_job: MakeJob) -> None:
    job = make_job(together=2)
    a, b = job.form("a", "b")
    a.fail(1)
    assert ids(a.generation(lambda g: g.number == 2)) == ["a", "b"]
    assert b.generation(lambda g: g.number == 2).interrupts_below == 2
    # A late report of the same failure has no effect.
    b.fail(1)
    b.beat(2, step=7)
    eventually(
        lambda: any(m.progress.step == 7 for m in job.get().members),
        "b's heartbeat behind its report",
    )
    assert job.get().generation.number == 2


def test_stop_reaches_every_member_and_closes_the_job(make_job: MakeJob) -> None:
    job = make_job(together=2)
    a, b = job.form("a", "b")
    (waiting,) = job.start("c")
    assert waiting.received("standby").reason == "the job is full (max_workers=2)"
    job.client.stop_job(job.job_id, reason="enough")
    for member in (a, b, waiting):
        assert member.received("stop").reason == "enough"
    error = job.join("d").end()
    assert error is not None
    assert error.reason == "RUN_ENDED"
    for member in (a, b, waiting):
        member.leave(pb.Leave.REASON_DRAINED)
        assert member.end() is None
    eventually(lambda: job.get().phase == pb.JOB_PHASE_FINISHED, "the job to be finished")
    assert job.get().generation.number == 1


def test_members_that_finish_one_after_another_interrupt_nobody(make_job: MakeJob) -> None:
    job = make_job(together=2)
    a, b = job.form("a", "b")
    c = job.join("c")
    c.welcome()
    a.leave(pb.Leave.REASON_FINISHED)
    assert a.end() is None
    assert c.received("stop").reason == "member a reached the end of its script"
    assert "stop" not in b.kinds()
    b.leave(pb.Leave.REASON_FINISHED)
    assert b.end() is None
    assert job.get().phase == pb.JOB_PHASE_FINISHED
    assert b.kinds() == ["welcome", "generation"]


def test_member_that_opens_a_second_stream_continues_there(make_job: MakeJob) -> None:
    job = make_job()
    (a,) = job.form("a")
    again = job.join("a", last=1)
    again.welcome()
    error = a.end()
    assert error is not None
    assert error.reason == "SESSION_REPLACED"
    again.beat(1, step=3)
    eventually(
        lambda: job.get().members[0].progress.step == 3, "the heartbeat of the second stream"
    )
    assert job.get().generation.number == 1


def test_within_the_reconnect_grace_a_broken_stream_decides_nothing(
    make_coordinator: Callable[..., Coordinator], own_redis: EmbeddedRedis
) -> None:
    coordinator = make_coordinator("--redis", own_redis.url, "--reconnect-grace", "1200ms")
    with coordinator.client() as client:
        job = create_job(coordinator, client, together=2)
        a, b = job.form("a", "b")
        b.kill()
        back = job.join("b", last=1)
        back.welcome()
        a.kill()
        # a does not come back.
        assert ids(back.generation()) == ["b"]
        events = [
            (event.kind, event.member_id)
            for event in job.events()
            if event.kind in ("member_lost", "generation_formed")
        ]
        assert events == [
            ("generation_formed", ""),
            ("member_lost", "a"),
            ("generation_formed", ""),
        ]
        job.close()


def test_streams_that_all_break_at_once_are_attributed_to_the_network_and_leases_decide(
    make_job: MakeJob,
) -> None:
    job = make_job(together=3, lease_ms=1500)
    members = job.form("a", "b", "c")
    for member in members:
        member.cut()
    a, b = job.join("a", last=1), job.join("b", last=1)
    for member in (a, b):
        member.welcome()

    def beaten() -> bool:
        for member in (a, b):
            member.beat(1)
        return job.phase_of("c") == ""

    eventually(beaten, "c's lease to end")
    generation = a.generation(lambda g: g.number == 2)
    assert ids(generation) == ["a", "b"]
    assert endings(job) == [("c", "lease_expired")]


def test_deaths_behind_a_failed_collective_are_not_attributed_to_the_network(
    make_job: MakeJob,
) -> None:
    job = make_job(together=3)
    a, b, c = job.form("a", "b", "c")
    b.cut()
    c.cut()
    a.fail(1)
    a.generation(lambda g: ids(g) == ["a"])
    assert sorted(endings(job)) == [("b", "stream_broken"), ("c", "stream_broken")]


def test_unknown_member_that_claims_an_old_generation_is_refused(make_job: MakeJob) -> None:
    job = make_job()
    job.form("a")
    error = job.join("x", last=1).end()
    assert isinstance(error, StaleGenerationError)
    error = job.join("y", last=2_000_000).end()
    assert error is not None
    assert error.reason == "GENERATION_UNKNOWN"


def test_another_process_cannot_take_a_members_name(make_job: MakeJob) -> None:
    job = make_job()
    (a,) = job.form("a")
    error = job.join("a", pid=2).end()
    assert error is not None
    assert error.reason == "MEMBER_CONFLICT"
    a.beat(1, step=1)
    eventually(lambda: job.get().members[0].progress.step == 1, "a to be heard")


def test_a_malformed_message_ends_the_session(make_job: MakeJob) -> None:
    job = make_job()
    (a,) = job.form("a")
    a.say(pb.MemberMessage())
    error = a.end()
    assert error is not None
    assert error.reason == "REQUEST_INVALID"
    eventually(lambda: not job.get().members, "the member to be evicted")


def test_events_are_kept_and_followed(make_job: MakeJob) -> None:
    job = make_job()
    job.form("a")
    kinds = [event.kind for event in job.events()]
    assert kinds == ["job_created", "member_joined", "member_ready", "generation_formed"]
    after = job.events()[1].event_id
    followed = job.client.watch_events(job.job_id, after_event_id=after, follow=True)
    assert [next(followed).kind, next(followed).kind] == kinds[2:]
    a = job.members[0]
    a.leave(pb.Leave.REASON_FINISHED)
    left, finished = sorted(
        (next(followed), next(followed)), key=lambda event: event.kind, reverse=True
    )
    assert (left.kind, left.member_id, left.attributes["ending"]) == (
        "member_left",
        "a",
        "finished",
    )
    assert finished.kind == "job_finished"
    assert finished.unix_ms > 0
    followed.cancel()
    assert a.end() is None
