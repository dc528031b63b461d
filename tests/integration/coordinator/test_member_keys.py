"""A member can act only for itself: a client with a worker's token but without the member's key can
neither join, call nor leave as that member."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from shoal_common.clients import CoordinatorClient
from shoal_common.errors import PermissionDeniedError
from shoal_protos.v1 import coordinator_pb2 as pb

from tests.integration.coordinator.harness import Coordinator, Job, Member
from tests.zygote.children import Zygote, eventually

OWN, OTHER = "0" * 32, "1" * 32


@pytest.fixture
def guarded(zygote: Zygote, tmp_path: Path) -> Iterator[Coordinator]:
    (tmp_path / "tokens").write_text("worker: wt\nadmin: at\n")
    coordinator = Coordinator(zygote, tmp_path, "--tokens", str(tmp_path / "tokens")).start()
    yield coordinator
    coordinator.close()


@pytest.fixture
def own(guarded: Coordinator) -> Iterator[CoordinatorClient]:
    with guarded.client(token="wt", member_key=OWN) as client:
        yield client


@pytest.fixture
def other(guarded: Coordinator) -> Iterator[CoordinatorClient]:
    with guarded.client(token="wt", member_key=OTHER) as client:
        yield client


@pytest.fixture
def member(guarded: Coordinator, own: CoordinatorClient) -> Member:
    """Member a, in generation 1."""
    own.create_job(pb.JobSpec(job_id="job", min_workers=1, max_workers=1, lease_ms=60_000))
    (joined,) = Job(guarded, own, "job").form("a")
    return joined


@pytest.mark.parametrize("key", [OTHER, None])
def test_members_session_cannot_be_taken_over_without_its_key(
    guarded: Coordinator, member: Member, key: str | None
) -> None:
    with guarded.client(token="wt", member_key=key) as client:
        thief = Member(member.job, "a", client=client, last=1)
        eventually(lambda: thief.ended, "the refusal")
        assert isinstance(thief.error, PermissionDeniedError)
        assert thief.error.reason == "MEMBER_KEY_WRONG"
    assert not member.ended
    member.beat(1)
    assert member.job.phase_of("a") == "ranked"


def test_returning_member_is_recognized_by_its_key_even_after_a_restart(
    guarded: Coordinator, member: Member
) -> None:
    again = Member(member.job, "a", last=1)
    again.welcome()
    assert again.error is None


def test_leasing_for_a_member_or_reporting_its_end_requires_its_key(
    other: CoordinatorClient, own: CoordinatorClient, member: Member
) -> None:
    asked = {"loader": "l", "epoch": 0, "batches_in_epoch": 4, "want": 1}
    for call in (
        lambda: other.lease_batches("job", "a", **asked),
        lambda: other.report_exit("job", "a", exit_code=1),
    ):
        with pytest.raises(PermissionDeniedError) as refused:
            call()
        assert refused.value.reason == "MEMBER_KEY_WRONG"
    assert member.job.phase_of("a") == "ranked"
    assert len(own.lease_batches("job", "a", **asked).batches) == 1
    assert other.report_exit("job", "a", key=OWN, exit_code=1).was_member, (
        "its launcher knows the key"
    )


def test_admin_may_report_that_a_member_has_ended(guarded: Coordinator, member: Member) -> None:
    with guarded.client(token="at") as admin:
        assert admin.report_exit("job", "a", exit_code=1).was_member
