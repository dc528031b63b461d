"""Stops and drains that coincide with another event: a member that learns of them late, a death, a
start that is still in progress."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.worker_elastic.cluster import Cluster, cluster
from tests.relay import BACK, Relay
from tests.zygote.children import Zygote, eventually


def same_end(results: list[dict[str, Any]]) -> None:
    assert len({r["steps"] for r in results}) == 1
    assert len({r["digest"] for r in results}) == 1


@contextmanager
def third_receives_nothing(zygote: Zygote, directory: Path) -> Iterator[tuple[Cluster, Relay]]:
    """Starts three workers, and then blocks the coordinator's messages to the third."""
    with (
        cluster(zygote, directory, EPOCHS="4", MICRO="1") as running,
        Relay(running.address) as line,
        running.held(),
    ):
        for index, address in enumerate([running.address, running.address, line.address]):
            running.start(index, SHOAL_COORDINATOR=address)
        running.wait_steps(1)
        line.hold([BACK])
        yield running, line


def test_member_that_receives_the_stop_late_ends_at_the_step_boundary_of_the_others(
    zygote: Zygote, tmp_path: Path
) -> None:
    with third_receives_nothing(zygote, tmp_path) as (running, line):
        running.client.stop_job("job", reason="test")
        eventually(
            lambda: len(list(running.output.glob("*.json"))) == 3,
            "the end of all loops, also of the one that heard nothing",
        )
        line.open()
        same_end(running.finish(0, 1, 2))


def test_a_death_while_the_job_stops_lets_the_others_end_at_one_step_boundary(
    zygote: Zygote, tmp_path: Path
) -> None:
    with third_receives_nothing(zygote, tmp_path) as (running, line):
        running.signal(0, signal.SIGKILL)
        running.client.stop_job("job", reason="test")
        eventually(lambda: running.job().generation.number == 2, "the generation without the dead")
        line.open()
        results = running.finish(1, 2)
        same_end(results)
        assert {r["world"] for r in results} == {2}


@pytest.mark.parametrize(
    "ask",
    [
        lambda running: running.signal(0, signal.SIGTERM),
        lambda running: running.client.stop_job("job", reason="test"),
    ],
    ids=["drain", "stop"],
)
def test_member_asked_to_leave_before_its_first_state_is_complete_ends_well(
    zygote: Zygote, tmp_path: Path, ask: Callable[[Cluster], object]
) -> None:
    with cluster(zygote, tmp_path, min_workers=2, max_workers=2, EPOCHS="4", MICRO="1") as running:
        running.start(0)
        running.start(1, SHOAL_FAILPOINTS="session.before_reconcile@1=kill")
        assert running.workers[1].wait() == -signal.SIGKILL
        ask(running)
        assert running.workers[0].wait() == 0, running.workers[0].said()


def test_joiner_after_the_last_step_ends_without_reporting_a_model_it_never_received(
    zygote: Zygote, tmp_path: Path
) -> None:
    with cluster(
        zygote, tmp_path, min_workers=2, max_workers=3, join_grace_ms=0, EPOCHS="1"
    ) as running:
        linger = running.output / "linger"
        linger.touch()
        running.start(0)
        running.start(1)
        running.wait_steps(10)
        running.start(2)
        eventually(lambda: running.job().generation.number == 2, "the generation with the joiner")
        linger.unlink()
        assert {r["world"] for r in running.finish(0, 1, may_end_well=True)} == {2}
        assert not (running.output / f"{running.members[2]}.json").exists()


@pytest.mark.parametrize("waits_for", ["the coordinator", "others"])
def test_member_asked_to_leave_before_it_has_a_rank_ends_well(
    zygote: Zygote, tmp_path: Path, waits_for: str
) -> None:
    with (
        cluster(zygote, tmp_path, min_workers=2, max_workers=2, EPOCHS="1") as running,
        Relay(running.address) as line,
    ):
        if waits_for == "the coordinator":
            line.hold([BACK])
        running.start(0, SHOAL_COORDINATOR=line.address)
        if waits_for == "the coordinator":
            eventually(lambda: line.connections == 1, "the worker to ask the coordinator")
        else:
            eventually(lambda: len(running.job().members) == 1, "the worker to be a member")
        running.signal(0, signal.SIGTERM)
        assert running.workers[0].wait() == 0, running.workers[0].said()
        line.open()
