"""A generation's table of ranks is announced and stored by its changes only."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from shoal_common.errors import CorruptDataError
from shoal_common.formats import rank_table
from shoal_coordinator.membership.model.effects import SendStandby
from shoal_coordinator.membership.model.events import (
    Ending,
    LeaveReason,
    MemberJoined,
    MemberLeft,
    MemberLost,
    MemberReady,
    RunWanted,
)
from shoal_coordinator.membership.model.pulse import Pulses, attached
from shoal_coordinator.membership.model.rank_changes import MOST_ADDED, change_between
from shoal_coordinator.membership.model.spec import JobSpec, Policy
from shoal_coordinator.membership.model.state import (
    Cause,
    Generation,
    Identity,
    JobPhase,
    JobState,
    Now,
    Rank,
    RunId,
)
from shoal_coordinator.membership.transition import Transition, job_created, transition
from shoal_coordinator.service.messages.responses import announcement
from shoal_coordinator.state.codec import decode_state, encode_changes, everything
from shoal_protos.v1 import coordinator_pb2 as pb

MEMBERS = 200


def identity(number: int) -> Identity:
    return Identity(
        member_id=f"m{number}",
        host=f"h{number // 8}",
        pid=1,
        launcher_id="",
        local_index=number % 8,
        donor_address=f"10.0.0.1:{number + 1}",
        metrics_address="",
    )


def rank(name: str, host: str = "h") -> Rank:
    return Rank(
        member_id=name, host=host, local_rank=0, local_world_size=1, donor_address="", joining=False
    )


def generation(names: str, number: int = 1) -> Generation:
    ranks = tuple(map(rank, names))
    return Generation(
        number=number,
        nonce="0" * 32,
        cause=Cause.START,
        ranks=ranks,
        interrupts_below=1,
        created_unix_ms=0,
    )


class Job:
    """A job and its fields in Redis."""

    def __init__(self) -> None:
        self.state = job_created(
            JobSpec(job_id="j", min_workers=MEMBERS // 2, max_workers=MEMBERS, join_grace_ms=0),
            RunId(),
        )
        self.disk = dict(encode_changes(self.state, everything(self.state)).put)
        self.written: dict[str, str] = {}
        self.work_in = 0
        """The generation that all members' heartbeats report."""
        self._ms = 0

    def happen(self, *events: object, after_ms: int = 1) -> Transition:
        self._ms += after_ms
        pulse = replace(attached(None, self._ms), generation=self.work_in)
        pulses = Pulses(members=dict.fromkeys(self.state.members, pulse))
        now = Now(ms=self._ms, unix_ms=self._ms)
        decided = transition(
            self.state, now, events, pulses=pulses, nonce=f"{self._ms:032x}", policy=Policy()
        )  # type: ignore[arg-type]
        written = encode_changes(decided.state, decided.changes)
        self.written = dict(written.put)
        self.disk |= written.put
        for name in written.remove:
            self.disk.pop(name, None)
        self.state = decided.state
        return decided

    def begin(self) -> None:
        self.happen(
            *(
                MemberJoined(identity=identity(number), last_generation=0)
                for number in range(MEMBERS)
            )
        )
        self.happen(*(MemberReady(member_id=f"m{number}") for number in range(MEMBERS)))

    def lose(self, *names: str) -> Transition:
        return self.happen(
            *(MemberLost(member_id=name, ending=Ending.PROCESS_EXITED, detail="") for name in names)
        )

    def read(self) -> JobState:
        return decode_state(self.disk)


@pytest.mark.parametrize(
    ("before", "after", "removed", "added"),
    [
        ("abcd", "abd", (2,), ()),
        ("abcd", "abcde", (), (4,)),
        ("abcd", "axbcd", (), (1,)),
        ("abcd", "acxd", (1,), (2,)),
        ("abcd", "bcda", (0,), (3,)),
        ("abc", "xyz", (0, 1, 2), (0, 1, 2)),
        ("abc", "abc", (), ()),
    ],
)
def test_change_lists_departed_and_new_members(
    before: str, after: str, removed: tuple[int, ...], added: tuple[int, ...]
) -> None:
    old, ranks = generation(before), tuple(map(rank, after))
    change = change_between(old, ranks)
    assert change is not None
    assert (change.since, change.removed, change.added) == (1, removed, added)
    assert "".join(rank_table.follow(before, removed, [(at, after[at]) for at in added])) == after


def test_applied_change_gives_the_new_table() -> None:
    shuffled = random.Random(1)
    for _ in range(300):
        before = "".join(shuffled.sample("abcdefghijkl", shuffled.randint(1, 12)))
        after = "".join(shuffled.sample("abcdefghijklmnop", shuffled.randint(1, 12)))
        change = change_between(generation(before), tuple(map(rank, after)))
        assert change is not None
        assert (
            "".join(
                rank_table.follow(before, change.removed, [(at, after[at]) for at in change.added])
            )
            == after
        )


def test_member_with_a_new_donor_address_is_reported_again() -> None:
    old = generation("ab")
    change = change_between(old, (old.ranks[0], replace(old.ranks[1], donor_address="elsewhere:1")))
    assert change is not None
    assert (change.removed, change.added) == ((1,), (1,))


def test_change_too_large_to_report_makes_members_request_the_table() -> None:
    ranks = tuple(rank(f"m{number}") for number in range(MOST_ADDED + 1))
    assert change_between(generation("a"), ranks) is None


@pytest.mark.parametrize(
    ("removed", "added"),
    [
        ((5,), ()),
        ((-1,), ()),
        ((1, 1), ()),
        ((), ((5, "x"),)),
        ((), ((1, "x"), (1, "y"))),
        ((), ((-1, "x"),)),
    ],
)
def test_a_change_that_does_not_fit_its_table_is_refused(
    removed: tuple[int, ...], added: tuple[tuple[int, str], ...]
) -> None:
    with pytest.raises(CorruptDataError):
        rank_table.follow("abc", removed, added)


@pytest.mark.parametrize("found", [[0], [0, 0], [-1, 2], [2, 2]])
def test_invalid_runs_of_ranks_are_refused(found: list[int]) -> None:
    assert list(rank_table.of_runs(rank_table.runs([0, 1, 2]), 3)) == [0, 1, 2]
    with pytest.raises(CorruptDataError):
        list(rank_table.of_runs(found, 3))


def test_one_death_among_many_writes_only_that_death() -> None:
    job = Job()
    job.begin()
    assert len(job.disk["ranks"]) > 20 * MEMBERS
    for number in range(5):
        job.lose(f"m{10 * number}")
        assert sum(map(len, job.written.values())) < 1500, job.written
        assert "ranks" not in job.written
        assert job.read().generation == job.state.generation
    assert job.state.number == 6


def test_table_is_rewritten_after_many_changes_which_are_deleted() -> None:
    job = Job()
    job.begin()
    for number in range(80):
        job.lose(f"m{number}")
        assert job.read().generation == job.state.generation
    changes = [name for name in job.disk if name.startswith("change:")]
    assert 0 < len(changes) <= 64
    assert json.loads(job.disk["ranks"])["number"] > 1


def test_next_run_starts_without_the_table_and_changes_of_the_previous_one() -> None:
    job = Job()
    job.begin()
    job.lose("m1")
    job.lose("m2")
    assert {"ranks", "generation", "change:2", "change:3"} <= job.disk.keys()
    job.happen(
        *(
            MemberLeft(member_id=name, reason=LeaveReason.FINISHED, detail="")
            for name in job.state.members
        )
    )
    assert job.state.phase is JobPhase.FINISHED
    job.happen(RunWanted(spec=job.state.spec))
    assert job.state.run.number == 2
    assert job.state.generation is None
    assert not [
        name for name in job.disk if name in ("ranks", "generation") or name.startswith("change:")
    ]
    assert job.read().run == job.state.run
    job.begin()
    assert job.read().generation == job.state.generation


def test_missing_change_or_change_of_another_table_is_an_invalid_state() -> None:
    job = Job()
    job.begin()
    for name in ("m1", "m2"):
        job.lose(name)
    for disk in (
        {name: value for name, value in job.disk.items() if name != "change:2"},
        job.disk | {"change:3": job.disk["change:2"]},
    ):
        with pytest.raises(CorruptDataError, match=r"change:[23]"):
            decode_state(disk)


def test_table_of_an_older_release_is_read_and_the_next_one_is_written_in_full() -> None:
    job = Job()
    job.begin()
    assert job.state.generation is not None
    head = json.loads(job.disk["generation"])
    names = (
        "member_id",
        "host",
        "local_rank",
        "local_world_size",
        "donor_address",
        "joining",
        "donor_key",
    )
    older = {
        name: head[name]
        for name in ("number", "nonce", "cause", "interrupts_below", "created_unix_ms")
    }
    older["ranks"] = [
        {name: getattr(each, name) for name in names} for each in job.state.generation.ranks
    ]
    job.disk["generation"] = json.dumps(older)
    job.disk["header"] = job.disk["header"].replace('"format":4', '"format":3')
    del job.disk["ranks"]
    read = job.read()
    assert read.generation is not None
    assert read.generation.ranks == job.state.generation.ranks
    job.state = read
    job.lose("m3")
    assert "ranks" in job.written
    assert job.read().generation == job.state.generation


def test_a_death_is_announced_to_a_large_world_in_less_than_two_hundred_bytes() -> None:
    job = Job()
    job.begin()
    job.lose("m17")
    assert job.state.generation is not None
    announced = announcement(job.state.generation)
    messages = [announced(position) for position in range(MEMBERS - 1)]
    assert max(map(len, messages)) < 200
    read = [pb.MemberDirective.FromString(message) for message in messages]
    assert [each.rank for each in read] == list(range(MEMBERS - 1))
    assert {each.generation.number for each in read} == {2}
    assert list(read[0].generation.change.removed) == [17]
    assert read[0].generation.table_digest == rank_table.digest(
        each.line for each in job.state.generation.ranks
    )
    assert read[0].generation.most_local_ranks == 8


def test_a_small_world_is_sent_in_full() -> None:
    announced = pb.MemberDirective.FromString(announcement(generation("abc"))(2))
    assert [each.member_id for each in announced.generation.ranks] == ["a", "b", "c"]
    assert announced.rank == 2


def test_member_of_a_generation_holds_state_for_a_restarted_coordinator_too() -> None:
    job = Job()
    job.begin()
    job.work_in = 1
    job.lose("m0")
    assert sum(map(len, job.written.values())) < 1500, (
        "the flag that members have worked is not stored per member"
    )
    job.state, job.work_in = job.read(), 0
    job.lose("m1")
    assert job.state.generation is not None
    assert not any(each.joining for each in job.state.generation.ranks)


def test_member_that_has_trained_holds_state_even_after_losing_its_place() -> None:
    job = Job()
    job.begin()
    job.work_in = 1
    job.lose("m0")
    job.state, job.work_in = job.read(), 0
    job.lose(*(f"m{number}" for number in range(1, MEMBERS // 2 + 1)))
    assert job.state.phase is JobPhase.WAITING
    assert all(member.holds_state for member in job.state.members.values())


def test_waiting_members_are_not_notified_of_each_of_thousands_of_arrivals() -> None:
    job = Job()
    job.state = job_created(
        JobSpec(job_id="j", min_workers=5000, max_workers=5000, join_grace_ms=0), RunId()
    )
    announced = 0
    for first in range(0, 4000, 400):
        numbers = range(first, first + 400)
        job.happen(
            *(MemberJoined(identity=identity(number), last_generation=0) for number in numbers)
        )
        decided = job.happen(
            *(MemberReady(member_id=f"m{number}") for number in numbers), after_ms=1000
        )
        announced += sum(isinstance(effect, SendStandby) for effect in decided.effects)
    assert 0 < announced < 4000
