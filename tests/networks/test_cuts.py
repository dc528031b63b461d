"""Cuts among the machines of a run: what is in reach goes on, what was cut off comes back, and nothing is done twice or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.networks.network import COORDINATOR, Network

Make = Callable[..., Network]


@pytest.mark.soak
def test_a_coordinator_out_of_reach_for_25_s_restarts_nobody_and_no_step_is_redone(network: Make) -> None:
    job = network(4)
    job.launch_all()
    with job.parted([COORDINATOR], job.hosts):
        job.lasts(25)
    job.lasts(15)
    job.finish()
    assert len(job.workers()) == 4, "workers were restarted"


@pytest.mark.soak
def test_a_cut_between_two_workers_is_explained_and_one_of_them_is_kept_out(network: Make) -> None:
    job = network(3)
    job.launch_all(nnodes="2:3")
    job.cut(["host-1"], ["host-2"])
    job.wait_explained("host-1", "host-2")
    job.wait_acted_on()
    job.heal(["host-1"], ["host-2"])
    job.finish(redone=1)
