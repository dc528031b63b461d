"""The rate that a worker tells of itself."""

from __future__ import annotations

import pytest
from shoal_worker.elastic.progress import ProgressMeter
from shoal_worker.metrics import WorkerMetrics


class Clock:
    """Stands until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("step_s", [0.01, 0.3, 2.5])
def test_the_rate_is_that_of_the_last_second_or_of_the_last_step_if_that_took_longer(step_s: float) -> None:
    clock = Clock()
    meter = ProgressMeter(WorkerMetrics(), clock=clock)
    assert meter.message().samples_per_s == 0
    for step in range(200):
        meter.committed(steps=step + 1, samples=6, loss=None)
        clock.now += step_s
    assert meter.message().samples_per_s == pytest.approx(6 / step_s, rel=0.02)
    assert meter.message().step_time_s == pytest.approx(step_s)


def test_the_rate_of_a_worker_that_does_not_get_on_falls() -> None:
    clock = Clock()
    meter = ProgressMeter(WorkerMetrics(), clock=clock)
    for step in range(3):
        clock.now += 0.1
        meter.committed(steps=step + 1, samples=10, loss=None)
    rates = []
    for _ in range(4):
        rates.append(meter.message().samples_per_s)
        clock.now += 1.0
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 10
