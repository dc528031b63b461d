"""The clock of leases and deadlines: time during which the coordinator was stopped does not count.
Redis' clock includes it."""

from __future__ import annotations

from shoal_coordinator.membership.model.pulse import attached, expired
from shoal_coordinator.service.clock import Clock

LEASE_MS = 500
"""The shortest lease that a job may have."""


class Monotonic:
    def __init__(self) -> None:
        self.ms = 1_000

    def __call__(self) -> int:
        return self.ms


def test_time_between_readings_counts() -> None:
    monotonic = Monotonic()
    clock = Clock(5_000_000, monotonic_ms=monotonic)
    before = clock.now()
    for _ in range(100):
        monotonic.ms += 100
        after = clock.now()
    assert after.ms - before.ms == after.unix_ms - before.unix_ms == 10_000


def test_a_pause_longer_than_a_lease_ends_none() -> None:
    monotonic = Monotonic()
    clock = Clock(5_000_000, monotonic_ms=monotonic)
    pulses = {"a": attached(None, clock.now().ms)}
    monotonic.ms += 60_000
    now = clock.now()
    assert expired(pulses, now.ms, LEASE_MS) == []
    assert now.unix_ms == 5_060_000
    # From then on the clock is read regularly, and a member that stays silent is evicted.
    for _ in range(4):
        monotonic.ms += 100
        now = clock.now()
    assert expired(pulses, now.ms, LEASE_MS) == ["a"]


def test_redis_time_is_kept_over_a_pause() -> None:
    monotonic = Monotonic()
    clock = Clock(0, monotonic_ms=monotonic)
    monotonic.ms += 60_000
    clock.adjust(7_000_000)
    monotonic.ms += 50
    assert clock.now().unix_ms == 7_000_050
