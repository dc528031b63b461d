"""A worker behind a slow link holds all others back: it is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.networks.network import Network

Make = Callable[..., Network]


@pytest.mark.soak
def test_a_worker_behind_5_mbit_per_s_is_named_while_the_others_wait_for_it(network: Make) -> None:
    job = network(3, WIDTH="60000", EPOCHS="3")
    job.launch_all()
    job.release()
    job.machines.slow_down("host-1", mbit_per_s=5)
    job.wait_explained("host-1")
    job.finish()
