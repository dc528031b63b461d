"""A member that hangs while its heartbeats continue is evicted, no matter what the progress counts
of the others are, and no other member is evicted."""

from __future__ import annotations

import random

import pytest
from shoal_coordinator.membership.model.events import (
    CollectiveFailed,
    Event,
    MemberJoined,
    MemberReady,
)
from shoal_coordinator.membership.model.pulse import Progress, Pulse, Pulses, attached, beaten
from shoal_coordinator.membership.model.spec import JobSpec, Policy
from shoal_coordinator.membership.model.state import Identity, JobState, Now
from shoal_coordinator.membership.transition import next_wake_ms, transition

STALL_MS = 3_000
BEAT_MS = 1_000


class Run:
    """A job of `world` members, simulated in steps of milliseconds."""

    def __init__(self, world: int, random_: random.Random) -> None:
        self.ms = 0
        self.state = JobState(
            spec=JobSpec(
                job_id="j",
                min_workers=1,
                max_workers=world,
                lease_ms=10 * BEAT_MS,
                stall_timeout_ms=STALL_MS,
            )
        )
        self.names = [f"m{index}" for index in range(world)]
        self.pulses: dict[str, Pulse] = {}
        # Each process counts from its own start, so a replacement is far behind a veteran.
        self.sequences = {
            name: random_.choice([1, 30, 100_000]) + random_.randrange(20) for name in self.names
        }
        joins = [MemberJoined(identity=identity(name), last_generation=0) for name in self.names]
        self.happen(*joins, *(MemberReady(member_id=name) for name in self.names))
        self.pulses = {name: attached(None, 0) for name in self.names}

    def happen(self, *events: Event) -> None:
        decided = transition(
            self.state,
            Now(ms=self.ms, unix_ms=0),
            events,
            pulses=Pulses(members=self.pulses),
            nonce="0" * 32,
        )
        self.state = decided.state
        self.pulses = {
            name: pulse for name, pulse in self.pulses.items() if name in self.state.members
        }

    def beat(self, name: str, *, moved: bool) -> None:
        if name in self.pulses:
            self.sequences[name] += moved
            self.pulses[name] = beaten(
                self.pulses[name], self.ms, 1, Progress(sequence=self.sequences[name])
            )

    def fail(self, name: str, *, timed_out: bool) -> None:
        self.happen(
            CollectiveFailed(
                member_id=name, generation=1, suspects=(), timed_out=timed_out, detail=""
            )
        )


def identity(name: str) -> Identity:
    return Identity(
        member_id=name,
        host="h",
        pid=1,
        launcher_id="l",
        local_index=0,
        donor_address="",
        metrics_address="",
    )


@pytest.mark.parametrize("seed", range(30))
def test_hung_member_is_evicted_and_those_that_wait_for_it_are_not(seed: int) -> None:
    random_ = random.Random(seed)
    run = Run(random_.randint(2, 6), random_)
    hung, *waiting = random_.sample(run.names, len(run.names))
    hangs_at = random_.randrange(2_000, 6_000)
    # The first member whose collective reaches its deadline ends its group, which fails the others'
    # collectives too.
    times_out_at = hangs_at + random_.choice([500, STALL_MS, 5 * STALL_MS])
    reports_at = {name: times_out_at + random_.randrange(400) for name in waiting}
    first = min(reports_at, key=reports_at.__getitem__)
    offsets = {name: random_.randrange(BEAT_MS) for name in run.names}
    evicted_at = None
    for run.ms in range(0, times_out_at + 2 * STALL_MS, 50):
        for name in run.names:
            if (run.ms + offsets[name]) % BEAT_MS < 50:
                run.beat(name, moved=run.ms < hangs_at)
        for name in waiting:
            if reports_at[name] <= run.ms < reports_at[name] + 50:
                run.fail(name, timed_out=name == first)
        wake = next_wake_ms(run.state, run.ms - 50)
        if wake is not None and wake <= run.ms:
            run.happen()
        if evicted_at is None and hung not in run.state.members:
            evicted_at = run.ms
    assert evicted_at is not None
    assert evicted_at >= times_out_at
    # The last movement is reported by the next heartbeat, at most one interval later. The check may
    # be as late.
    assert (
        evicted_at
        <= max(times_out_at + Policy().timeout_settle_ms, hangs_at + STALL_MS + BEAT_MS)
        + 2 * BEAT_MS
    )
    assert set(run.state.members) == set(waiting)
    assert run.state.number == 2


def test_a_member_that_moves_after_its_peers_timed_out_is_only_slow() -> None:
    run = Run(3, random.Random(0))
    run.ms = 10_000
    for name in run.names:
        run.beat(name, moved=False)
    run.fail("m0", timed_out=True)
    run.fail("m1", timed_out=False)
    run.ms = 10_500
    run.beat("m2", moved=True)
    run.ms = 12_000
    run.happen()
    assert set(run.state.members) == {"m0", "m1", "m2"}
    assert run.state.number == 2
