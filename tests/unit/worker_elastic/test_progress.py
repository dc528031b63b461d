"""The progress that a worker reports: its rate, its waits, and the script's numbers."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_common.errors import ConfigurationError
from shoal_common.formats.tally import TallyWriter, read_tally
from shoal_common.system.processes import children_cpu_s
from shoal_worker.elastic.coordinator.coordinator_messages import progress_message
from shoal_worker.elastic.coordinator.progress import ProcessorTime, ProgressMeter
from shoal_worker.metrics import WorkerMetrics

from tests.zygote.children import eventually


class Clock:
    """A clock that changes only when a test moves it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("step_s", [0.01, 0.3, 2.5])
def test_rate_is_that_of_the_last_second_or_of_a_longer_last_step(
    step_s: float,
) -> None:
    clock = Clock()
    meter = ProgressMeter(WorkerMetrics(), clock=clock)
    assert meter.snapshot().samples_per_s == 0
    for step in range(200):
        meter.committed(steps=step + 1, samples=6, loss=None)
        clock.now += step_s
    assert meter.snapshot().samples_per_s == pytest.approx(6 / step_s, rel=0.02)
    assert meter.snapshot().step_time_s == pytest.approx(step_s)


def test_rate_of_a_stalled_worker_falls() -> None:
    clock = Clock()
    meter = ProgressMeter(WorkerMetrics(), clock=clock)
    for step in range(3):
        clock.now += 0.1
        meter.committed(steps=step + 1, samples=10, loss=None)
    rates = []
    for _ in range(4):
        rates.append(meter.snapshot().samples_per_s)
        clock.now += 1.0
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 10


def test_ranks_working_time_is_distinguished_from_waiting_for_peers() -> None:
    clock = Clock()
    meter = ProgressMeter(WorkerMetrics(), clock=clock)
    for step in range(10):
        clock.now += 0.2
        with meter.waits.of("all_reduce"):
            with meter.waits.of("broadcast"):  # nested waits count once
                clock.now += 0.3
            clock.now += 0.5
        meter.committed(steps=step + 1, samples=1, loss=None)
    reported = meter.snapshot()
    assert reported.step_time_s == pytest.approx(1.0)
    assert reported.busy_time_s == pytest.approx(0.2)
    assert reported.waiting_s == 0


def test_step_far_longer_than_earlier_ones_is_reported_before_it_ends() -> None:
    clock = Clock()
    meter = ProgressMeter(WorkerMetrics(), clock=clock)
    for step in range(40):
        clock.now += 0.2
        meter.committed(steps=step + 1, samples=1, loss=None)
    clock.now += 1.0
    with meter.waits.of("all_reduce"):
        clock.now += 14.0
        reported = meter.snapshot()
    assert (reported.waiting_s, reported.waiting_in) == (pytest.approx(14.0), "all_reduce")
    assert reported.step_time_s == pytest.approx(15.0)
    assert reported.busy_time_s == pytest.approx(1.0)


def test_the_processor_time_of_children_counts_as_that_of_their_process() -> None:
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        eventually(lambda: children_cpu_s() > 0.05, "a child's processor time")
        used = ProcessorTime(Clock()).seconds()
        assert used > time.process_time()
    finally:
        spinning.kill()
        spinning.wait()


@pytest.mark.parametrize(
    "reported",
    [
        0.25,
        torch.tensor(0.25),
        torch.tensor([0.25], dtype=torch.bfloat16),
        torch.tensor(0.25, requires_grad=True) * 1,
    ],
)
def test_loss_is_reported_as_a_number_or_a_one_element_tensor(
    reported: float | torch.Tensor,
) -> None:
    metrics = WorkerMetrics()
    meter = ProgressMeter(metrics)
    assert math.isnan(meter.snapshot().loss)
    meter.loss.report(reported)
    assert meter.snapshot().loss == 0.25
    assert metrics.registry.get_sample_value("shoal_worker_loss") == 0.25


def test_reported_loss_is_unaffected_by_later_changes_to_its_tensor() -> None:
    meter = ProgressMeter(WorkerMetrics())
    running = torch.tensor(1.0)
    meter.loss.report(running)
    running += 5
    assert meter.snapshot().loss == 1.0


@pytest.mark.parametrize(
    "reported",
    [
        torch.zeros(2),
        torch.zeros((), device="meta"),
        torch.zeros((), dtype=torch.complex64),
        "low",
        None,
    ],
)
def test_value_that_is_not_one_number_is_refused_as_a_loss(reported: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"shoal\.report\(loss=\.\.\.\): got .*; expected one number"
    ):
        ProgressMeter(WorkerMetrics()).loss.report(reported)


def test_reported_numbers_are_in_the_heartbeat_by_name() -> None:
    meter = ProgressMeter(WorkerMetrics())
    meter.report({"loss": 0.5, "accuracy": torch.tensor(0.25)})
    meter.report({"lr": 0.1})
    message = progress_message(meter.snapshot())
    assert message.loss == 0.5
    assert dict(message.metrics) == {"accuracy": 0.25, "lr": 0.1}


def test_too_many_names_of_numbers_are_refused() -> None:
    meter = ProgressMeter(WorkerMetrics())
    meter.report({f"metric{number}": 0.0 for number in range(16)})
    meter.report({"metric3": 1.0, "loss": 1.0})
    with pytest.raises(ConfigurationError, match=r"only 16 names besides the loss .*metric15"):
        meter.report({"one_more": 1.0})
    with pytest.raises(ConfigurationError, match=r"report\(metric3=\.\.\.\): got 'x'; expected"):
        meter.report({"metric3": "x"})  # type: ignore[dict-item]  # a user may do this
    with pytest.raises(ConfigurationError, match="the name has 65 characters; expected at most 64"):
        ProgressMeter(WorkerMetrics()).report({"n" * 65: 1.0})


def test_numbers_reported_after_the_last_step_reach_the_launcher(tmp_path: Path) -> None:
    meter = ProgressMeter(WorkerMetrics())
    meter.tally_writer = TallyWriter(tmp_path / "tally")
    meter.report({"accuracy": 0.5})
    meter.committed(steps=1, samples=4, loss=None)
    meter.tally(1, 4, 4, generation=1, asynchronous=False)
    meter.report({"accuracy": 0.75, "loss": 2.0})
    meter.write_last()
    tally = read_tally(tmp_path / "tally")
    assert tally is not None
    assert tally.metrics == {"accuracy": 0.75}
    assert (tally.steps, tally.counts.commits) == (1, 1)
    assert (tally.counts.losses, tally.counts.loss_sum, tally.counts.loss) == (1, 2.0, 2.0)


def test_pushed_round_stays_pushed_as_the_last_numbers_are_written(
    tmp_path: Path,
) -> None:
    meter = ProgressMeter(WorkerMetrics())
    meter.tally_writer = TallyWriter(tmp_path / "tally")
    meter.tally(1, 4, 4, generation=1, asynchronous=True, pushed=False)
    meter.round_pushed()
    meter.write_last()
    tally = read_tally(tmp_path / "tally")
    assert tally is not None
    assert (tally.own_steps, tally.own_samples) == (1, 4)
