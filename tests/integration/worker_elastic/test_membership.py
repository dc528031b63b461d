"""One real membership with a real coordinator. Its peers are sessions that the test opens, and
never form a process group."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from shoal_common.clients import CoordinatorClient
from shoal_common.errors import (
    ConfigurationError,
    DeadlineError,
    InternalError,
    MembershipChanged,
    PreconditionError,
    ShoalError,
)
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_worker.backends.base import CommunicationBackend
from shoal_worker.backends.gloo.backend import GlooBackend
from shoal_worker.backends.waits import Waits
from shoal_worker.elastic.contract.generation import Generation, MemberIdentity, Peer
from shoal_worker.elastic.contract.loader_interface import Drained, StopTraining
from shoal_worker.elastic.coordinator import membership
from shoal_worker.elastic.coordinator.link import CoordinatorLink
from shoal_worker.elastic.coordinator.member import LeaveReason
from shoal_worker.elastic.coordinator.membership import Membership, connect
from shoal_worker.elastic.coordinator.stall_watch import unreachable
from shoal_worker.elastic.group import waiting
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.group.transfer import StateDonor
from shoal_worker.settings import WorkerSettings
from shoal_worker.store.redis_store import RedisStore

from tests.integration.coordinator.harness import Coordinator, Job, create_job, eventually
from tests.zygote.children import Zygote

SECOND = timedelta(seconds=1)


@pytest.fixture
def job(zygote: Zygote, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    coordinator = Coordinator(zygote, tmp_path).start()
    with coordinator.client() as client:
        job = create_job(
            coordinator,
            client,
            smallest=request.param[0],
            largest=request.param[1],
            join_grace_ms=60_000,
        )
        yield job
        job.close()
    coordinator.close()


def test_reachable_peers_are_distinguished_from_unreachable_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    there = StateDonor("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        refusing = f"127.0.0.1:{gone.getsockname()[1]}"
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as deaf,
        socket.create_connection(deaf.getsockname()[:2]),
    ):
        silent = f"127.0.0.1:{deaf.getsockname()[1]}"  # its backlog is full, as if a cable were cut
        peers = {0: there.address, 2: refusing, 3: silent, 5: "no-such-host.invalid:1"}
        assert unreachable(peers, timeout=SECOND / 5, given_up=lambda: False) == [2, 3, 5]
        assert unreachable(peers, timeout=SECOND * 60, given_up=lambda: True) == []
    there.close()
    assert not caplog.records


def test_unusable_backend_is_an_error_that_is_not_retried(redis_url: str) -> None:
    def make_backend() -> CommunicationBackend:
        raise ConfigurationError("backend='nccl': no CUDA device")

    peers = tuple(
        Peer(rank=rank, member_id=f"{rank}", host="h", donor_address="127.0.0.1:1", joining=False)
        for rank in (0, 1)
    )
    RedisStore(redis_url, "prefix", timeout=SECOND).add("arrived", 1)  # the peer
    with pytest.raises(ConfigurationError, match="no CUDA device"):
        connect(
            Generation(number=1, nonce="0" * 32, peers=peers, rank=0, interrupts_below=0),
            make_backend=make_backend,
            store_url=redis_url,
            prefix="prefix",
            host="127.0.0.1",
            arrival_timeout=10 * SECOND,
            connect_timeout=SECOND,
            collective_timeout=SECOND,
            announce=lambda forming: None,
            waits=Waits(),
        )


@pytest.mark.parametrize("job", [(1, 2)], indirect=True)
def test_two_members_that_cannot_reach_each_other_are_separated(job: Job) -> None:
    membership = joined(job)
    (b,) = job.start("b", host="h2")  # never comes to a group, and nothing listens at its address
    for number in (1, 2):
        b.generation(lambda g, number=number: g.number == number)
        with pytest.raises(MembershipChanged, match=f"generation {number} did not form") as failure:
            membership.form()
        membership.failed(failure.value)
        b.fail(number, suspects=[0], timed_out=True)
    eventually(lambda: job.phase_of("b") == "quarantined", "b to be kept out")
    assert membership.link.wait_generation(after=2, timeout=60 * SECOND).world_size == 1
    reports = [
        e.attributes for e in job.events() if e.kind == "collective_failed" and e.member_id == "a"
    ]
    assert [(report["suspects"], report["timed_out"]) for report in reports] == [("b", "true")] * 2
    membership.leave(LeaveReason.DRAINED)


@pytest.mark.parametrize("job", [(1, 2)], indirect=True)
@pytest.mark.parametrize(
    ("reason", "alone", "asks"),
    [
        (LeaveReason.FINISHED, False, True),
        (LeaveReason.FINISHED, True, False),
        (LeaveReason.FAILED, False, False),
    ],
)
def test_group_ends_in_order_only_if_the_run_is_over_for_all(
    job: Job, reason: Any, alone: bool, asks: bool
) -> None:
    membership = joined(job)
    group = mock.Mock(spec=Group)
    membership._group = group
    membership.leave(reason, alone=alone)
    assert [name for name, _, _ in group.method_calls] == [
        *(["all_leave"] if asks else []),
        "abort",
        "close",
    ]


@pytest.mark.parametrize("job", [(1, 2)], indirect=True)
def test_member_that_finishes_in_a_new_generation_stops_nobody_there(job: Job) -> None:
    membership = joined(job)
    link = membership.link
    (b,) = job.start("b")
    assert link.wait_generation(after=0, timeout=60 * SECOND).number == 1
    link.entered(1)
    b.kill()
    assert link.wait_generation(after=1, timeout=60 * SECOND).number == 2
    link.entered(2)
    (c,) = job.start("c")
    assert link.wait_generation(after=2, timeout=60 * SECOND).number == c.generation().number == 3
    link.entered(3)
    membership.leave(LeaveReason.FINISHED)
    c.beat(3)
    c.leave(pb.Leave.REASON_FINISHED)
    assert c.end() is None
    assert c.kinds() == ["welcome", "generation"]


@pytest.mark.parametrize("job", [(2, 3)], indirect=True)
def test_failure_in_a_stopping_job_is_answered_by_a_generation_or_a_refusal(
    job: Job,
) -> None:
    membership = joined(job)
    b, _ = job.start("b", "c", host="h2")
    b.generation()
    with pytest.raises(MembershipChanged) as failure:
        membership.form()
    job.client.stop_job(job.job_id, reason="enough")
    eventually(lambda: membership.link.stopped, "the stop")
    membership.failed(failure.value)
    job.members[1].kill()
    b.generation(lambda g: g.number == 2)
    with pytest.raises(MembershipChanged, match="generation 2 did not form") as failure:
        membership.form()  # the known stop does not end it in the middle of a step
    membership.failed(failure.value)
    b.kill()
    with pytest.raises(StopTraining, match="enough"):
        # a wait for enough members would end in a DeadlineError
        membership.form()
    membership.leave(LeaveReason.DRAINED)


@pytest.mark.parametrize("job", [(2, 3)], indirect=True)
def test_draining_member_joins_the_generation_after_a_failure_that_may_need_its_state(
    job: Job,
) -> None:
    membership = joined(job)
    b, c = job.start("b", "c", host="h2")
    b.generation()
    with pytest.raises(MembershipChanged, match="generation 1 did not form") as failure:
        membership.form()
    membership.link.drain("preempted")
    membership.failed(failure.value)
    c.kill()
    with pytest.raises(MembershipChanged, match="generation 2 did not form") as failure:
        membership.form()
    membership.failed(failure.value)
    # too few are left: the job is on hold, but the member does not wait for more
    b.kill()
    with pytest.raises(Drained, match="preempted"):
        # a wait for enough members would end in a DeadlineError
        membership.form()
    membership.leave(LeaveReason.DRAINED)


@pytest.mark.parametrize("job", [(1, 1)], indirect=True)
def test_a_leave_does_not_hold_the_group_while_the_coordinator_is_away(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    membership = joined(job)
    host, _, port = job.coordinator.address.rpartition(":")
    job.coordinator.kill()
    with socket.create_server((host, int(port))):
        # accepts connections and stays silent, like a machine that hangs
        eventually(
            lambda: "lost the connection to the coordinator" in caplog.text, "the link to notice"
        )
        began = time.monotonic()
        membership.link.leave(LeaveReason.FINISHED, timeout=60 * SECOND)
        assert time.monotonic() - began < 30, "it waited for a coordinator that is away"
        membership.leave(LeaveReason.FINISHED)


def test_coordinator_that_does_not_listen_yet_is_not_a_lost_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    identity = MemberIdentity(
        job_id="job", member_id="a", host="h1", pid=os.getpid(), donor_address="127.0.0.1:1"
    )
    client = CoordinatorClient(ChannelSettings(address=address))
    link = CoordinatorLink(client, identity, on_generation=lambda _: None)
    with pytest.raises(DeadlineError, match="waited 1 s for the coordinator"):
        link.connect(SECOND)
    eventually(lambda: link.away_s > 0, "the link to fail to connect")
    link.leave(LeaveReason.DRAINED)
    assert not caplog.records


@pytest.mark.parametrize("job", [(1, 1)], indirect=True)
def test_member_whose_link_fails_by_its_own_fault_stops_training(
    job: Job,
) -> None:
    def broken(generation: Generation) -> None:
        raise OSError("the group cannot be ended")

    identity = MemberIdentity(
        job_id=job.job_id, member_id="a", host="h1", pid=os.getpid(), donor_address="127.0.0.1:1"
    )
    link = CoordinatorLink(job.coordinator.client(), identity, on_generation=broken)
    link.connect(60 * SECOND)
    link.ready()
    with pytest.raises(InternalError, match="the group cannot be ended"):
        link.wait_generation(after=1, timeout=60 * SECOND)
    assert link.refused is not None
    link.leave(LeaveReason.FAILED)


def test_leaving_member_does_not_wait_for_a_slow_name_lookup() -> None:
    looking, looked = threading.Event(), threading.Event()

    class SlowToExplain(CoordinatorClient):
        def find_obstacle(self) -> None:
            looking.set()
            looked.wait(60)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    link = CoordinatorLink(
        SlowToExplain(ChannelSettings(address=address)),
        MemberIdentity(job_id="job", member_id="a", host="h1", pid=os.getpid()),
        on_generation=lambda _: None,
    )
    signalled = threading.Thread(target=lambda: looking.wait(60) and link.drain("SIGTERM"))
    signalled.start()
    began = time.monotonic()
    with pytest.raises(Drained, match="SIGTERM"):
        link.connect(60 * SECOND)
    assert time.monotonic() - began < 40, "it waited for the lookup"
    looked.set()
    signalled.join()
    link.leave(LeaveReason.FAILED)


def joined(job: Job) -> Membership:
    """Joins as member "a", which then waits for a rank."""
    settings = WorkerSettings(
        collective_timeout_s=0.3, connect_timeout_s=0.3, rendezvous_timeout_s=60
    )
    identity = MemberIdentity(
        job_id=job.job_id, member_id="a", host="h1", pid=os.getpid(), donor_address="127.0.0.1:1"
    )
    membership = Membership(job.coordinator.client(), identity, settings, host="127.0.0.1")
    membership.make_backend = no_backend
    membership.join()
    membership.link.ready()
    return membership


def no_backend() -> Any:
    raise AssertionError("nobody else arrives, so nothing is connected")


def real_link(job: Job, member_id: str, **more: Any) -> CoordinatorLink:
    identity = MemberIdentity(job_id=job.job_id, member_id=member_id, host="h9", pid=os.getpid())
    client = more.pop("client", None) or job.coordinator.client()
    link = CoordinatorLink(client, identity, on_generation=lambda _: None, **more)
    link.connect(60 * SECOND)
    link.ready()
    return link


@pytest.mark.parametrize("job", [(2, 3)], indirect=True)
def test_excluded_rank_is_evicted_when_the_run_ends_without_it(job: Job) -> None:
    b, c = job.start("b", "c")
    link = real_link(job, "a")
    for number in (1, 2):
        generation = link.wait_generation(after=number - 1, timeout=60 * SECOND)
        assert (generation.number, generation.rank) == (number, 2)
        link.entered(number)
        for peer in (b, c):
            peer.beat(number)
        link.failed(number, detail="timed out", suspects=[0])
        b.fail(number, suspects=[2])
        c.fail(number)
    eventually(lambda: job.phase_of("a") == "quarantined", "a to be kept out")
    assert link.evicted is None
    b.leave(pb.Leave.REASON_FINISHED)
    with pytest.raises(PreconditionError, match="continued without this member"):
        link.wait_generation(after=2, timeout=60 * SECOND, mid_step=True)
    assert link.evicted is not None
    link.leave(LeaveReason.FAILED)


@pytest.mark.parametrize("job", [(1, 2)], indirect=True)
def test_collective_failure_before_a_boundary_is_reported_even_if_the_next_generation_is_known(
    job: Job,
) -> None:
    link = real_link(job, "a")
    (b,) = job.start("b", host="h2")
    link.wait_generation(after=0, timeout=60 * SECOND)
    link.entered(1)
    b.beat(1)
    job.client.drain_member(job.job_id, member_id="b")
    # waits for the step boundary, which the collective prevents it from reaching
    link.wait_generation(after=1, timeout=60 * SECOND)
    link.failed(1, detail="timed out", timed_out=True)
    eventually(
        lambda: any(e.kind == "collective_failed" and e.generation == 1 for e in job.events()),
        "the report",
    )
    link.leave(LeaveReason.DRAINED)


@pytest.mark.parametrize("job", [(1, 1)], indirect=True)
def test_wait_for_a_generation_continues_while_the_coordinator_is_away(
    job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "EVERY_S", 0.2)
    link = real_link(job, "a")
    link.wait_generation(after=0, timeout=60 * SECOND)
    job.coordinator.kill()
    eventually(lambda: link.away_s > 0, "the coordinator to be missed")
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()

    def wait() -> None:
        try:
            answers.put(link.wait_generation(after=1, timeout=SECOND, mid_step=True))
        except ShoalError as error:
            answers.put(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    eventually(
        lambda: "waiting for a generation above 1 for 2 s" in caplog.text,
        "a line that says what is waited for",
    )
    assert "the coordinator has been unreachable" in caplog.text
    assert answers.empty(), "it gave up while the coordinator was away"
    job.coordinator.start()
    answers.get(timeout=60)  # the next generation, or its own deadline, which applies again
    waiter.join()
    link.leave(LeaveReason.FINISHED)


@pytest.mark.parametrize("job", [(1, 1)], indirect=True)
def test_wait_for_a_coordinator_that_never_returns_is_eventually_given_up(job: Job) -> None:
    link = real_link(job, "a", away_limit=SECOND / 2)
    link.wait_generation(after=0, timeout=60 * SECOND)
    job.coordinator.kill()
    with pytest.raises(DeadlineError, match="has been unreachable"):
        link.wait_generation(after=1, timeout=60 * SECOND, mid_step=True)
    link.leave(LeaveReason.FAILED)


@pytest.mark.parametrize("job", [(2, 2)], indirect=True)
def test_members_of_a_job_lost_by_the_coordinator_continue_in_it(job: Job) -> None:
    links = [real_link(job, name) for name in ("a", "b")]
    for link in links:
        link.wait_generation(after=0, timeout=60 * SECOND)
        link.entered(1)
    job.coordinator.kill()
    job.coordinator.start()  # with its own empty Redis
    found = [link.wait_generation(after=1, timeout=60 * SECOND, mid_step=True) for link in links]
    assert [(g.number, g.rank, g.world_size) for g in found] == [(2, 0, 2), (2, 1, 2)]
    assert not any(peer.joining for peer in found[0].peers)
    for link in links:
        assert link.refused is None
        link.leave(LeaveReason.FINISHED)


class Slower(CoordinatorClient):
    """A client that is too late: another client, which belongs to no run, creates the job just
    before it."""

    settings: ChannelSettings

    def create_job(self, spec: pb.JobSpec, **more: Any) -> pb.CreateJobResponse:
        with CoordinatorClient(self.settings) as other:
            assert other.create_job(spec).created
        return super().create_job(spec, **more)


@pytest.mark.parametrize("job", [(1, 1)], indirect=True)
def test_member_restores_its_run_if_another_began_while_it_reported_the_job(
    job: Job,
) -> None:
    settings = ChannelSettings(address=job.coordinator.address)
    client = Slower(settings)
    client.settings = settings
    link = real_link(job, "a", client=client)
    link.wait_generation(after=0, timeout=60 * SECOND)
    link.entered(1)
    run = job.get().run
    job.coordinator.kill()
    job.coordinator.start()
    assert link.wait_generation(after=1, timeout=60 * SECOND, mid_step=True).number == 2
    assert link.refused is None
    assert job.get().run == run
    link.leave(LeaveReason.FINISHED)


def test_generation_that_forms_slowly_names_the_missing_members(
    redis_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "EVERY_S", 0.1)
    monkeypatch.setattr(waiting, "EVERY_S", 0.1)
    peers = tuple(
        Peer(rank=rank, member_id=f"{rank}", host=f"host-{rank}", donor_address="", joining=False)
        for rank in (0, 1, 2)
    )
    waits = Waits()
    with pytest.raises(MembershipChanged, match=r"rank 1 \(host-1\), rank 2 \(host-2\)"):
        connect(
            Generation(number=4, nonce="0" * 32, peers=peers, rank=0, interrupts_below=0),
            make_backend=GlooBackend,
            store_url=redis_url,
            prefix="slowly",
            host="127.0.0.1",
            arrival_timeout=SECOND,
            connect_timeout=SECOND,
            collective_timeout=SECOND,
            announce=lambda forming: None,
            waits=waits,
        )
    assert "waiting for generation 4 to form" in caplog.text
    assert "not yet arrived: rank 1 (host-1), rank 2 (host-2)" in caplog.text
    assert waits.total_s >= 1
