"""A worker behind a slow link slows all others down, and `shoal status` names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.networks.network import Network

Make = Callable[..., Network]

WIDE = "19000"
"""Width of the model. With this width, one, two and three ranks end each of 30 steps with the same
bits, so the time when a rank joins does not matter. With 20000, the last bit of one element depends
on the number of ranks after step 17, because a sum falls on a rounding boundary
(docs/decisions/0004-deterministic-sums.md)."""


@pytest.mark.soak
def test_a_worker_behind_5_mbit_per_s_is_named_while_the_others_wait_for_it(network: Make) -> None:
    job = network(3, WIDTH=WIDE, EPOCHS="2")
    job.launch_all()
    job.release()
    job.machines.slow_down("host-1", mbit_per_s=5)
    job.wait_explained(r"waiting for rank \d \(host-1\): the connection to it transfers")
    job.eventually(lambda: "host-1" in named_as_slow(job), "status to name the slow one")
    job.machines.speed_up("host-1")
    job.finish()


def named_as_slow(job: Network) -> str:
    """Returns the rank that `shoal status` reports as awaited, and the notes on all members."""
    status = job.status()
    return f"{status['waits_for']} {[member['note'] for member in status['members']]}"


@pytest.mark.soak
def test_worker_that_joins_over_a_slow_link_receives_the_state_and_takes_part(
    network: Make,
) -> None:
    job = network(3, WIDTH=WIDE, EPOCHS="3")
    for host in ("host-0", "host-1"):
        job.launch(host, nnodes="1:3")
    job.eventually(lambda: len(job.workers()) == 2, "two that train")
    job.machines.slow_down("host-2", mbit_per_s=5)
    job.launch("host-2", nnodes="1:3")
    job.wait_all_train()
    job.finish()
