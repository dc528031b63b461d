"""Seeded schedules of network faults during one run, which ends as if there had been none.
NETWORK_SEEDS=1,2,3 selects the schedules; a failure names its seed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

import pytest

from tests.networks.network import COORDINATOR, REDIS, Network

Make = Callable[..., Network]

FAULTS = 8
SEEDS = [int(seed) for seed in os.environ.get("NETWORK_SEEDS", "1,2,3").split(",")]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_run_under_a_schedule_of_cuts_ends_like_an_undisturbed_one(
    network: Make, seed: int
) -> None:
    schedule = random.Random(seed)
    job = network(4, EPOCHS="20")
    job.launch_all(nnodes="2:4")
    for _ in range(FAULTS):
        strike(job, schedule)
        job.wait_acted_on()
    job.wait_all_train()
    job.finish(redone=FAULTS)


def strike(job: Network, schedule: random.Random) -> None:
    """Makes a cut that lasts up to 20 s. A worker may die during it, and then the coordinator."""
    host, *more = schedule.sample(job.hosts, 3)
    some, others = schedule.choice(
        [
            ([host], job.others(host)),
            ([host], more[:1]),
            ([host], [COORDINATOR]),
            ([COORDINATOR], job.hosts),
            ([REDIS], [COORDINATOR]),
            ([host, more[0]], job.others(host, more[0])),
        ]
    )
    one_way = schedule.random() < 0.3
    with job.parted(some, others, one_way=one_way):
        job.lasts(schedule.uniform(0.5, 20))
        if schedule.random() < 0.3:
            job.kill_worker(more[-1])
            job.lasts(schedule.uniform(0, 3))
    if schedule.random() < 0.3:
        job.coordinator.send(signal.SIGKILL)
        job.coordinator.wait()
        job.start_coordinator()
