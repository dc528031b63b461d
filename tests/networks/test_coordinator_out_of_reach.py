"""The coordinator or Redis is unreachable, for all machines or for one. No worker is restarted
because of it, and training continues."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.networks.network import COORDINATOR, REDIS, Network

Make = Callable[..., Network]


@pytest.mark.slow
def test_training_continues_while_the_coordinator_is_briefly_out_of_reach(network: Make) -> None:
    job = network(2, EPOCHS="4")
    job.launch_all()
    with job.parted([COORDINATOR], job.hosts):
        job.run_alone()
        job.lasts(2)
        job.wait_steps(1)
    job.wait_steps(1)
    job.finish()
    job.check_all_stayed()


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [10, 25, 60])
def test_unreachable_coordinator_restarts_nobody_and_no_step_is_redone(
    network: Make, seconds: int
) -> None:
    job = network(4)
    job.launch_all()
    with job.parted([COORDINATOR], job.hosts):
        job.lasts(seconds)
    job.lasts(15)
    job.finish()
    job.check_all_stayed()


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [2, 25, 60])
@pytest.mark.parametrize("lost", ["to the hosts", "from the hosts"])
def test_coordinator_reachable_in_one_direction_only_restarts_nobody(
    network: Make, lost: str, seconds: int
) -> None:
    job = network(3)
    job.launch_all()
    ways = ([COORDINATOR], job.hosts)
    with job.parted(*(ways if lost == "to the hosts" else reversed(ways)), one_way=True):
        job.lasts(seconds)
    job.lasts(15)
    job.finish()
    job.check_all_stayed()


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [10, 60])
def test_machine_cut_off_only_from_the_coordinator_trains_on_with_the_others(
    network: Make, seconds: int
) -> None:
    job = network(3)
    job.launch_all(nnodes="2:3")
    with job.parted([COORDINATOR], ["host-1"]):
        job.lasts(seconds)
        job.wait_acted_on()
    job.wait_all_train()
    job.finish(redone=1)


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [10, 60])
@pytest.mark.parametrize("whose", ["the coordinator's", "everybody's"])
def test_unreachable_redis_restarts_nobody(network: Make, seconds: int, whose: str) -> None:
    job = network(3)
    job.launch_all()
    with job.parted([REDIS], [COORDINATOR] if whose == "the coordinator's" else job.others(REDIS)):
        job.lasts(seconds)
    job.lasts(15)
    job.finish()
    job.check_all_stayed()


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [10, 60])
def test_stalled_coordinator_restarts_nobody(network: Make, seconds: int) -> None:
    job = network(3)
    job.launch_all()
    with job.stopped(*job.machines.pids(COORDINATOR)):
        job.lasts(seconds)
    job.lasts(15)
    job.finish()
    job.check_all_stayed()


@pytest.mark.soak
def test_coordinator_restarted_behind_a_cut_finds_all_members_unchanged(
    network: Make,
) -> None:
    job = network(3)
    job.launch_all()
    with job.parted([COORDINATOR], job.hosts):
        job.coordinator.send(signal.SIGKILL)
        job.coordinator.wait()
        job.start_coordinator()
        job.lasts(15)
    job.lasts(15)
    job.finish()
    job.check_all_stayed()


@pytest.mark.soak
def test_worker_that_dies_while_the_coordinator_is_unreachable_is_replaced_on_its_return(
    network: Make,
) -> None:
    job = network(3)
    job.launch_all(nnodes="2:3")
    with job.parted([COORDINATOR], job.hosts):
        job.kill_worker("host-1")
        job.lasts(20)
    job.wait_all_train()
    job.finish(redone=1)


@pytest.mark.soak
def test_a_run_that_ends_while_the_coordinator_is_out_of_reach_is_finished(network: Make) -> None:
    job = network(3, EPOCHS="2")
    job.launch_all()
    with job.parted([COORDINATOR], job.hosts):
        job.release()
        job.lasts(25)
    job.finish()
    job.check_all_stayed()
