"""Launchers that join and leave while a run starts, runs and ends."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.networks.network import Network

Make = Callable[..., Network]

PREEMPTED = 128 + signal.SIGTERM


@pytest.mark.soak
def test_launcher_that_dies_as_the_run_starts_is_replaced_by_another(network: Make) -> None:
    job = network(3)
    lost = job.launch("host-0")
    job.launch("host-1")
    job.eventually(
        lambda: "job_id=default.nodes" in job.coordinator.said(),
        "launchers that wait for the third",
    )
    lost.send(signal.SIGKILL)
    lost.wait()
    job.launch("host-0")
    job.launch("host-2")
    job.wait_all_train()
    job.finish(statuses={lost: -signal.SIGKILL})


@pytest.mark.soak
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_launchers_that_leave_and_arrive_during_a_run_do_not_disturb_the_others(
    network: Make, how: signal.Signals
) -> None:
    job = network(3)
    first, second, third = job.launch_all(nnodes="1:3")
    third.send(how)
    status = third.wait()
    assert status == (PREEMPTED if how == signal.SIGTERM else -how)
    job.wait_steps(2)
    job.launch("host-2", nnodes="1:3")
    job.wait_all_train()
    job.finish(statuses={third: status}, redone=1)
    assert len(job.workers()) == 4, "workers were restarted"
    assert "restarting all workers" not in first.said() + second.said()


@pytest.mark.soak
def test_launcher_that_arrives_as_the_run_ends_restarts_nothing(network: Make) -> None:
    job = network(3, EPOCHS="2")
    early = [job.launch(host, nnodes="1:3") for host in ("host-0", "host-1")]
    job.eventually(lambda: len(job.workers()) == 2, "two that train")
    job.release()
    job.eventually(lambda: len(job.committed()) >= 18, "the end of the run")
    late = job.launch("host-2", nnodes="1:3")
    job.finish(statuses={late: late.wait()}, to_the_end=len(job.results()))
    assert "restarting all workers" not in "".join(launcher.said() for launcher in early)


@pytest.mark.soak
def test_launcher_asked_to_end_behind_a_cut_ends_and_starts_nothing(
    network: Make,
) -> None:
    job = network(3)
    *stay, goes = job.launch_all(nnodes="1:3")
    with job.parted(["host-2"], job.others("host-2")):
        job.lasts(3)
        goes.send(signal.SIGTERM)
        assert goes.wait() == PREEMPTED
    job.wait_acted_on()
    job.finish(statuses={goes: PREEMPTED}, redone=1, to_the_end=2)
    assert "restarting all workers" not in "".join(launcher.said() for launcher in (*stay, goes))
