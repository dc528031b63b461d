"""Cuts between the machines of a run: machines that still reach each other continue, a machine that
was cut off comes back, and every sample counts exactly once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.networks.network import COORDINATOR, REDIS, Network

Make = Callable[..., Network]


@pytest.mark.slow
def test_briefly_disconnected_machine_keeps_its_place(network: Make) -> None:
    job = network(3)
    job.launch_all()
    with job.parted(["host-1"], job.others("host-1")):
        job.lasts(2)
    job.wait_steps(2)
    job.finish()
    job.check_all_stayed()


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
@pytest.mark.parametrize("seconds", [10, 60])
def test_others_continue_without_a_disconnected_machine_and_it_returns(
    network: Make, seconds: int, strategy: str
) -> None:
    job = network(4, STRATEGY=strategy)
    job.launch_all(nnodes="2:4")
    with job.parted(["host-1"], job.others("host-1")):
        job.lasts(seconds)
        if seconds > 15:
            job.wait_acted_on()
    job.wait_all_train()
    job.finish(redone=1)


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [10, 60])
def test_run_that_requires_all_its_workers_waits_for_the_disconnected_one(
    network: Make, seconds: int
) -> None:
    job = network(3)
    job.launch_all("--min-workers", "3")
    with job.parted(["host-1"], job.others("host-1")):
        if seconds > 15:
            job.wait_explained(r"wait.*host-1")
        job.lasts(seconds)
    job.wait_all_train()
    job.finish(redone=1)


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [2, 10, 60])
def test_half_with_the_coordinator_continues_and_the_other_half_returns(
    network: Make, seconds: int
) -> None:
    job = network(4)
    job.launch_all(nnodes="2:4")
    with job.parted(["host-2", "host-3"], [COORDINATOR, REDIS, "host-0", "host-1"]):
        job.lasts(seconds)
        if seconds > 15:
            job.wait_acted_on()
    job.wait_all_train()
    job.finish(redone=1)


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [10, 60])
def test_halves_that_are_both_too_small_wait_for_each_other(network: Make, seconds: int) -> None:
    job = network(4)
    job.launch_all("--min-workers", "4")
    with job.parted(["host-2", "host-3"], [COORDINATOR, REDIS, "host-0", "host-1"]):
        job.lasts(seconds)
    job.wait_all_train()
    job.finish(redone=1)


@pytest.mark.soak
@pytest.mark.parametrize("direction", ["sends", "receives"])
@pytest.mark.parametrize("seconds", [2, 10, 60])
def test_machine_cut_off_in_one_direction_only_returns(
    network: Make, seconds: int, direction: str
) -> None:
    job = network(3)
    job.launch_all(nnodes="2:3")
    ways = (["host-1"], job.others("host-1"))
    with job.parted(*(ways if direction == "sends" else reversed(ways)), one_way=True):
        job.lasts(seconds)
        if seconds > 15:
            job.wait_acted_on()
    job.wait_all_train()
    job.finish(redone=1)


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [2, 10])
def test_cut_between_two_workers_that_heals_soon_costs_nobody_its_place(
    network: Make, seconds: int
) -> None:
    job = network(3)
    job.launch_all()
    with job.parted(["host-1"], ["host-2"]):
        job.lasts(seconds)
    job.wait_steps(2)
    job.finish()
    assert len(job.workers()) == 3, "workers were restarted"


@pytest.mark.soak
@pytest.mark.parametrize("one_way", [False, True])
def test_cut_between_two_workers_is_explained_and_the_others_continue_without_one_of_them(
    network: Make, one_way: bool
) -> None:
    job = network(3)
    job.launch_all(nnodes="2:3")
    with job.parted(["host-1"], ["host-2"], one_way=one_way):
        job.wait_explained(r"not reach rank \d \(host-[12]\)")
        job.wait_acted_on()
    job.wait_all_train()
    job.finish(redone=1)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("between", ["evaluate", "save", "epoch"])
def test_rank_cut_off_from_another_between_two_steps_is_replaced_when_it_returns(
    network: Make, between: str
) -> None:
    """The cut comes during an evaluation, during a checkpoint, or at the end of an epoch."""
    job = network(3, BETWEEN=between, EPOCHS="200" if between == "epoch" else "20")
    job.launch_all(nnodes="2:3")
    with job.parted(["host-1"], ["host-2"]):
        job.wait_explained(r"not reach rank \d \(host-[12]\)")
        job.wait_acted_on()
    job.eventually(
        lambda: "the other ranks took steps without this rank" in job.said(),
        "the one that was kept out to return",
    )
    job.wait_all_train()
    job.finish(redone=1)
    assert len(job.workers()) == 4, "one worker was to be replaced"


@pytest.mark.soak
def test_a_cut_as_the_workers_start_delays_them(network: Make) -> None:
    job = network(3)
    for host in job.hosts:
        job.launch(host)
    job.eventually(
        lambda: "job created job_id=default " in job.coordinator.said().replace("\n", " "),
        "the first launcher",
    )
    with job.parted(["host-1"], job.others("host-1")):
        job.lasts(10)
    job.wait_all_train()
    job.finish()


@pytest.mark.soak
def test_a_cut_as_the_run_ends_makes_nobody_miss_the_last_step(network: Make) -> None:
    job = network(3, EPOCHS="2")
    job.launch_all()
    job.wait_steps(3)
    job.release()
    with job.parted(["host-1"], job.others("host-1")):
        job.lasts(10)
    job.finish(redone=1)


@pytest.mark.soak
def test_machine_that_stalls_for_20_s_returns(network: Make) -> None:
    job = network(3)
    job.launch_all(nnodes="2:3")
    with job.stopped(*job.machines.pids("host-1")):
        job.lasts(20)
    job.wait_all_train()
    job.finish(redone=1)
