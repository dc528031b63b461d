"""The log lines of a waiting spare: how many ranks are missing, and why."""

import itertools
import logging
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import shoal
import torch
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import DeadlineError, UnavailableError
from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_worker.elastic.contract.generation import MemberIdentity
from shoal_worker.elastic.contract.loader_interface import Drained
from shoal_worker.elastic.coordinator.membership import Membership
from shoal_worker.elastic.group import waiting
from shoal_worker.settings import WorkerSettings

from tests.unit.worker_elastic.ranks import Member, Model


class Part(Model):
    """A model of which each replica is split across `ranks` ranks."""

    replica_size = 1

    def __init__(self, ranks: int) -> None:
        super().__init__(1.0)
        self.replica_size = ranks


def waits(member: Member, seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the member wait as a spare for `seconds` of the fake clock, after which it is asked to
    leave."""
    clock = itertools.count()
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))

    def nothing_comes(timeout: timedelta) -> None:
        if next(clock) >= seconds:
            member.membership.link.draining = "enough"
        raise DeadlineError("none")

    member.membership.await_generation = nothing_comes
    member.membership.link.become_spare = lambda: None
    with pytest.raises(Drained):
        member.formation.wait_as_spare()
    member.donor.close()


def spare(*, replica_size: int, world_size: int, rank: int, gone: tuple[str, ...]) -> Member:
    member = Member(cast(Any, Part(replica_size)))
    member.formation.group = cast(
        Any, SimpleNamespace(world_size=world_size, rank=rank, ended=False)
    )
    member.membership.last_departures = lambda: gone
    return member


def test_spare_reports_every_ten_seconds_how_many_ranks_are_missing_and_who_left_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    member = spare(
        replica_size=4,
        world_size=6,
        rank=5,
        gone=("w7 (its process ended with SIGKILL)", "w2 (SIGTERM)"),
    )
    with caplog.at_level(logging.WARNING):
        waits(member, 45, monkeypatch)
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("waiting for more ranks")
    ]
    assert len(lines) == 4
    assert lines[0].endswith(
        "a replica of the model needs 4 ranks; this is rank 5 of 6, and 2 more are needed for a "
        "replica that includes it; start more workers. Workers that left last: w7 (its process "
        "ended with SIGKILL), w2 (SIGTERM)"
    )


def test_spare_beyond_all_requested_replicas_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        waits(spare(replica_size=2, world_size=4, rank=3, gone=()), 15, monkeypatch)
    assert "as many replicas as requested" in caplog.text
    assert "Workers that left last: none known" in caplog.text


class Client:
    """A coordinator that has recorded `events` and returns those after a given one."""

    def __init__(self, *events: tuple[str, str, dict[str, str]]) -> None:
        self.events = list(events)
        self.away = False

    def watch_events(
        self, job_id: str, *, after_event_id: str, deadline: timedelta
    ) -> Iterator[pb.Event]:
        if self.away:
            raise UnavailableError("away")
        for number, (kind, member_id, attributes) in enumerate(self.events, 1):
            if number > int(after_event_id or 0):
                yield pb.Event(
                    event_id=str(number), kind=kind, member_id=member_id, attributes=attributes
                )


def test_last_departure_and_its_reason_come_from_the_coordinators_record() -> None:
    client = Client(
        ("member_joined", "w1", {}),
        (
            "member_lost",
            "w1",
            {"ending": "process_exited", "detail": "its process ended with SIGKILL"},
        ),
        ("member_left", "w2", {"ending": "drained", "detail": ""}),
    )
    identity = MemberIdentity(job_id="job", member_id="w0", host="here", pid=1)
    membership = Membership(
        cast(CoordinatorClient, client), identity, WorkerSettings(), host="here"
    )
    assert membership.last_departures() == ("w2 (drained)", "w1 (its process ended with SIGKILL)")
    client.events += [("member_lost", name, {"detail": "gone"}) for name in ("w3", "w4")]
    assert membership.last_departures() == ("w4 (gone)", "w3 (gone)", "w2 (drained)")
    client.away = True
    assert membership.last_departures() == ("w4 (gone)", "w3 (gone)", "w2 (drained)")


def replica_size(options: dict[str, Any]) -> int:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    model, _ = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1), **options)
    return cast(int, cast(Any, model).engine.replica_size)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"strategy": "ddp"}, 1), ({"strategy": "pipeline", "pipeline_parallel_size": 2}, 2)],
)
def test_strategy_determines_how_many_ranks_form_a_replica(
    options: dict[str, Any], expected: int
) -> None:
    assert shoal.launch(replica_size, options, world_size=2) == [expected] * 2
