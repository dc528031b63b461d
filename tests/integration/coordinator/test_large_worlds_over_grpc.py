"""More ranks than one message lists: announcements, GetRanks and members' links, with a real
coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from shoal.launcher.run.node_session import NodeSession
from shoal_common.clients import CoordinatorClient
from shoal_common.errors import MembershipChanged, StaleGenerationError, UnavailableError
from shoal_common.formats import rank_table
from shoal_common.formats.rank_table import MOST_SENT_WHOLE
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_worker.elastic.contract.generation import MemberIdentity
from shoal_worker.elastic.coordinator.link import CoordinatorLink

from tests.integration.coordinator.harness import Coordinator, Job, Member, create_job
from tests.zygote.children import eventually

WORLD = MOST_SENT_WHOLE + 4
NAMES = [f"m{number:02}" for number in range(WORLD - 1)]
MakeJob = Callable[..., Job]


class Asked(CoordinatorClient):
    """A client that counts its calls to GetRanks."""

    asked = 0

    def get_ranks(self, *positional: Any, **named: Any) -> pb.GetRanksResponse:
        self.asked += 1
        return super().get_ranks(*positional, **named)


class Linked:
    """A member with a worker's link; the other members only have sessions."""

    def __init__(self, job: Job) -> None:
        self.client = Asked(
            ChannelSettings(address=job.coordinator.address, deadline=timedelta(seconds=2))
        )
        identity = MemberIdentity(
            job_id=job.job_id,
            member_id="linked",
            host="h1",
            pid=1,
            local_index=WORLD,
            donor_address="127.0.0.1:1",
        )
        self.link = CoordinatorLink(self.client, identity, on_generation=lambda generation: None)

    def begin(self) -> None:
        self.link.connect(timedelta(seconds=30))
        self.link.ready()


@pytest.fixture
def formed(make_job: MakeJob) -> Iterator[tuple[Job, list[Member], Linked]]:
    job = make_job(together=WORLD, smallest=2)
    linked = Linked(job)
    linked.begin()
    members = job.start(*NAMES)
    for member in members:
        assert member.generation().number == 1
        member.beat(1)
    linked.link.wait_generation(after=0, timeout=timedelta(seconds=30))
    linked.link.entered(1)
    yield job, members, linked
    linked.client.close()


def lines(ranks: Any) -> list[str]:
    return [
        rank_table.line(rank.member_id, rank.host, rank.donor_address, rank.donor_key)
        for rank in ranks
    ]


def test_members_of_a_large_world_receive_their_rank_and_request_the_table(
    formed: tuple[Job, list[Member], Linked],
) -> None:
    job, members, _ = formed
    received = [member.received("generation") for member in members]
    generation = members[0].generation()
    assert not generation.ranks
    assert (generation.world_size, generation.most_local_ranks, list(generation.joining)) == (
        WORLD,
        WORLD,
        [0, WORLD],
    )
    asked = {"generation": 1, "nonce": generation.nonce}
    table = job.client.get_ranks(job.job_id, **asked).ranks
    assert [rank.rank for rank in table] == list(range(WORLD))
    assert rank_table.digest(lines(table)) == generation.table_digest
    ranks = [next(d.rank for d in member.seen if d.HasField("generation")) for member in members]
    assert [table[rank].member_id for rank in ranks] == [member.name for member in members]
    assert [
        rank.rank for rank in job.client.get_ranks(job.job_id, ranks=[5, 3], **asked).ranks
    ] == [5, 3]
    assert len(received) == len(members)


@pytest.mark.parametrize("wrong", [{"generation": 2}, {"nonce": "0" * 32}, {"nonce": ""}])
def test_ranks_are_sent_only_to_members_of_the_newest_generation(
    formed: tuple[Job, list[Member], Linked], wrong: dict[str, Any]
) -> None:
    job, members, _ = formed
    with pytest.raises(StaleGenerationError, match="the newest generation"):
        job.client.get_ranks(
            job.job_id, **{"generation": 1, "nonce": members[0].generation().nonce, **wrong}
        )


def test_member_trains_after_a_death_with_a_single_request_for_the_table(
    formed: tuple[Job, list[Member], Linked],
) -> None:
    _, members, linked = formed
    first = linked.link.newest_generation
    assert first is not None
    assert first.known is None
    before = [peer.member_id for peer in first.peers]
    assert sorted(before) == sorted([*NAMES, "linked"])
    victim = members[7]
    victim.kill()
    second = linked.link.wait_generation(after=1, timeout=timedelta(seconds=30))
    assert [peer.member_id for peer in second.peers] == [
        name for name in before if name != victim.name
    ]
    assert [peer.rank for peer in second.peers] == list(range(WORLD - 1))
    assert second.me.member_id == "linked"
    assert linked.client.asked == 1


def test_joiner_requests_the_table_and_the_others_do_not(
    formed: tuple[Job, list[Member], Linked],
) -> None:
    job, members, linked = formed
    assert linked.link.newest_generation is not None
    list(linked.link.newest_generation.peers)
    members[3].kill()
    second = linked.link.wait_generation(after=1, timeout=timedelta(seconds=30))
    for member in members:
        if member is not members[3]:
            member.beat(2)
    linked.link.entered(2)
    (joiner,) = job.start("late")
    # all max_workers are back, so there is no wait for the join grace
    third = linked.link.wait_generation(after=2, timeout=timedelta(seconds=30))
    assert third.known is not None
    assert {peer.member_id for peer in third.peers} - {peer.member_id for peer in second.peers} == {
        "late"
    }
    assert linked.client.asked == 1
    received = joiner.generation(lambda g: g.number == 3)
    table = job.client.get_ranks(job.job_id, generation=3, nonce=received.nonce).ranks
    assert (
        rank_table.digest(lines(table))
        == received.table_digest
        == rank_table.digest(peer.line for peer in third.peers)
    )
    assert list(received.joining) == [
        next(rank.rank for rank in table if rank.member_id == "late"),
        1,
    ]


def test_peers_of_a_superseded_generation_are_refused(
    formed: tuple[Job, list[Member], Linked],
) -> None:
    _, members, linked = formed
    first = linked.link.newest_generation
    assert first is not None
    members[0].kill()
    linked.link.wait_generation(after=1, timeout=timedelta(seconds=30))
    with pytest.raises(MembershipChanged, match="generation 1 has been superseded"):
        list(first.peers)


def test_launcher_among_many_receives_its_place(make_job: MakeJob) -> None:
    job = make_job(together=WORLD, smallest=2)
    session = NodeSession(
        job.client,
        job_id=job.job_id,
        launcher_id="l",
        address="127.0.0.1:4",
        on_change=lambda: None,
        on_job_lost=lambda: None,
    )
    for member in job.start(*NAMES):
        member.generation()
    placement = eventually(lambda: session.node_status.placement, "the launcher's place")
    assert placement.node_count == len(session.node_status.starts) == WORLD
    session.leave(pb.Leave.REASON_DRAINED, "the test is over")


def test_single_members_and_stragglers_are_reported_without_the_whole_job(
    formed: tuple[Job, list[Member], Linked],
) -> None:
    job, members, _ = formed
    for member in members:
        member.beat(1, step=5, sequence=5)
    members[2].beat(1, step=6, sequence=6)
    eventually(
        lambda: (
            {m.member_id for m in job.client.get_job(job.job_id, below_step=5).members}
            == {"linked"}
        ),
        "all but one to have told their step",
    )
    behind = job.client.get_job(job.job_id, below_step=6)
    assert len(behind.members) == 64
    assert not behind.generation.ranks
    assert behind.generation.number == 1
    assert not behind.generation.nonce
    assert [m.member_id for m in job.client.get_job(job.job_id, member_id="m02").members] == ["m02"]
    assert not job.client.get_job(job.job_id, member_id="nobody").members


def test_restarted_coordinator_rebuilds_the_table_from_its_written_changes(
    make_coordinator: Callable[..., Coordinator], tmp_path: Path
) -> None:
    coordinator = make_coordinator("--redis", f"embedded://{tmp_path}/data")
    client = coordinator.client()
    job = create_job(coordinator, client, together=WORLD, smallest=2)
    linked = Linked(job)
    linked.begin()
    members = job.start(*NAMES)
    for member in members:
        member.generation()
        member.beat(1)
    linked.link.wait_generation(after=0, timeout=timedelta(seconds=30))
    linked.link.entered(1)
    members[5].kill()
    second = linked.link.wait_generation(after=1, timeout=timedelta(seconds=30))
    coordinator.kill()
    with pytest.raises(UnavailableError):
        list(second.peers)
    coordinator.start()
    table = eventually(
        lambda: _received_peers(second.peers), "the table of a coordinator that is back"
    )
    assert sorted(peer.member_id for peer in table) == sorted(
        [*(n for n in NAMES if n != members[5].name), "linked"]
    )
    linked.client.close()
    job.close()
    client.close()


def _received_peers(peers: Any) -> list[Any] | None:
    try:
        return list(peers)
    except UnavailableError:
        return None
