"""The targets that Prometheus discovers for a job's processes. Their labels name places, which
outlive the processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shoal_coordinator.membership.model.spec import JobSpec
from shoal_coordinator.membership.model.state import (
    Cause,
    Generation,
    Identity,
    JobState,
    Member,
    MemberPhase,
    Rank,
)
from shoal_coordinator.service.discovery import targets

SPEC = JobSpec(job_id="j", min_workers=1, max_workers=9)


def member(
    name: str, *, host: str = "h", launcher: str = "l", index: int = 0, joined: int = 1
) -> Member:
    identity = Identity(
        member_id=name,
        host=host,
        pid=1,
        launcher_id=launcher,
        local_index=index,
        donor_address="",
        metrics_address=f"{name}:9",
    )
    return Member(identity=identity, phase=MemberPhase.RANKED, joined_unix_ms=joined, replays=False)


def listed(*members: Member, ranks: str = "") -> dict[str, dict[str, Any]]:
    """Returns the labels of each address."""
    placed = tuple(
        Rank(
            member_id=name,
            host="h",
            local_rank=0,
            local_world_size=1,
            donor_address="",
            joining=False,
        )
        for name in ranks
    )
    generation = Generation(
        number=1, nonce="", cause=Cause.START, ranks=placed, interrupts_below=1, created_unix_ms=0
    )
    state = JobState(
        spec=SPEC, members={each.member_id: each for each in members}, generation=generation
    )
    return {each["targets"][0]: each["labels"] for each in targets([state])}


def test_labels_are_kept_when_ranks_are_reassigned() -> None:
    a, b = member("a", index=0), member("b", index=1)
    before = listed(a, b, ranks="ab")
    assert before == listed(a, b, ranks="ba")
    assert before["a:9"] == {
        "job_id": "j",
        "role": "worker",
        "host": "h",
        "slot": "0",
        "instance": "h/0",
    }


def test_restarted_process_keeps_its_predecessors_labels() -> None:
    first, again = member("a"), member("b", joined=2)
    assert listed(first)["a:9"] == listed(again)["b:9"]
    assert listed(first, again) == listed(again), (
        "the old process is still a member, but its place is one target"
    )


def test_two_launchers_of_one_host_have_separate_places() -> None:
    instances = [
        labels["instance"]
        for labels in listed(member("a", launcher="x"), member("b", launcher="y")).values()
    ]
    assert instances == ["h/x/0", "h/y/0"]


def test_members_without_a_launcher_are_distinguished() -> None:
    one = member("a", launcher="")
    other = replace(one, identity=replace(one.identity, member_id="b", metrics_address="b:9"))
    assert len({labels["instance"] for labels in listed(one, other).values()}) == 2


def test_process_without_metrics_is_not_a_target() -> None:
    one = member("a")
    assert listed(replace(one, identity=replace(one.identity, metrics_address=""))) == {}
