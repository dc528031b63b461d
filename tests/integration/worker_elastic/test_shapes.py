"""The outcome of a step is the same on all ranks, regardless of the shape of the user's loop. The
scripts of all survivors see the same outcomes, so the state that the scripts themselves advance
(learning rate, loss scale, averages) stays the same on all ranks. The final state of each run is
bit-identical to that of a fault-free run of one worker, and every sample counts exactly once."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shoal_worker.checkpoint.files import latest, read_checkpoint
from shoal_worker.data.record import audit

from tests.integration.worker_elastic.cluster import Cluster, cluster
from tests.integration.worker_elastic.shapes import EPOCHS, STEPS
from tests.zygote.children import Zygote

SCRIPT = Path(__file__).with_name("shapes.py")
ALL = EPOCHS * STEPS


@pytest.fixture(scope="module")
def alone(
    zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """Returns a function that trains one worker without a fault, by shape and strategy, and returns
    its final state."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def run(shape: str, strategy: str = "ddp") -> dict[str, Any]:
        if (shape, strategy) not in known:
            directory = tmp_path_factory.mktemp(f"{shape}-{strategy}")
            with cluster(
                zygote, directory, max_workers=1, script=SCRIPT, SHAPE=shape, STRATEGY=strategy
            ) as running:
                running.start(0)
                (known[shape, strategy],) = running.finish(0)
        return known[shape, strategy]

    return run


def check_alike(results: list[dict[str, Any]], expected: dict[str, Any], running: Cluster) -> None:
    """Checks that survivors saw the same outcomes and ended with the state of the run without a
    fault."""
    received = {str(result["outcomes"]) for result in results}
    assert len(received) == 1, received
    for result in results:
        for name in ("steps", "count", "digest", "average", "lr", "scale", "evaluations"):
            assert result[name] == expected[name], name
    verdict = audit(running.records)
    assert all(epoch.exactly_once for epoch in verdict.epochs[:-1]), verdict


@pytest.mark.parametrize(
    "strategy", ["zero3", "fsdp", pytest.param("zero2", marks=pytest.mark.matrix)]
)
def test_committed_step_counts_although_a_peer_dies_before_the_script_ends_it(
    zygote: Zygote, tmp_path: Path, alone: Callable[..., dict[str, Any]], strategy: str
) -> None:
    """The gradients become available when the commit all-reduce completes. A forward pass without
    gradients then runs into the peer's death."""
    with cluster(zygote, tmp_path, script=SCRIPT, SHAPE="no_grad", STRATEGY=strategy) as running:
        for index in range(3):
            running.start(index, **({"DIE": "clipped:5"} if index == 1 else {}))
        check_alike(running.finish(0, 2), alone("no_grad", strategy), running)


@pytest.mark.parametrize(
    ("shape", "strategy"),
    [
        ("flat", "ddp"),
        ("ema", "ddp"),
        ("scaler", "ddp"),
        pytest.param("clip", "ddp", marks=pytest.mark.matrix),
        pytest.param("scaler", "zero2", marks=pytest.mark.matrix),
        pytest.param("clip", "zero3", marks=pytest.mark.matrix),
        pytest.param("evaluate", "zero1", marks=pytest.mark.matrix),
        pytest.param("save", "ddp", marks=pytest.mark.matrix),
    ],
)
def test_advanced_objects_stay_equal_when_one_rank_misses_the_commit_all_reduce(
    zygote: Zygote, tmp_path: Path, alone: Callable[..., dict[str, Any]], shape: str, strategy: str
) -> None:
    """State that is not registered: a scheduler, a moving average, a GradScaler, and a counter
    behind `if optimizer.step()`."""
    with cluster(zygote, tmp_path, script=SCRIPT, SHAPE=shape, STRATEGY=strategy) as running:
        for index in range(3):
            running.start(index, SHOAL_FAILPOINTS="step.summed@6=lose" if index == 1 else "")
        check_alike(running.finish(0, 1, 2), alone(shape, strategy), running)


@pytest.mark.parametrize(
    "shape", [pytest.param("flat", marks=pytest.mark.matrix), "scaler", "averaged"]
)
def test_joiner_receives_unregistered_schedulers_and_scalers(
    zygote: Zygote, tmp_path: Path, alone: Callable[..., dict[str, Any]], shape: str
) -> None:
    with cluster(
        zygote, tmp_path, script=SCRIPT, SHAPE=shape, min_workers=2, max_workers=2
    ) as running:
        with running.held():
            running.start(0)
            running.start(1)
            running.wait_steps(3)
            running.signal(1, signal.SIGKILL)
            running.start(2)
            running.wait_ranked(2)
        expected = alone(shape)
        for result in running.finish(0, 2):
            for name in ("digest", "lr", "scale", "average"):
                assert result[name] == expected[name], name


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_loop_left_by_break_ends_with_the_last_step_on_every_rank(
    zygote: Zygote, tmp_path: Path, alone: Callable[..., dict[str, Any]], strategy: str
) -> None:
    """The rank that is in doubt of the last step asks its peers for the outcome while they are
    leaving."""
    with cluster(zygote, tmp_path, script=SCRIPT, SHAPE="break", STRATEGY=strategy) as running:
        for index in range(3):
            running.start(
                index, SHOAL_FAILPOINTS=f"step.summed@{ALL - 3}=lose" if index == 0 else ""
            )
        check_alike(running.finish(0, 1, 2), alone("break", strategy), running)


def wait_for_preemption(running: Cluster) -> None:
    running.wait_steps(2)
    for index in range(3):
        running.signal(index, signal.SIGTERM)


def newest_step(running: Cluster) -> int:
    found = latest(running.output / "checkpoints")
    assert found is not None
    return int(read_checkpoint(found).state["steps"])


@pytest.mark.parametrize(
    ("strategy", "shape"),
    [
        ("zero2", "stop"),
        ("zero2", "finally"),
        pytest.param("ddp", "stop", marks=pytest.mark.matrix),
    ],
)
def test_ranks_all_asked_to_leave_stop_at_one_step_boundary_and_save_together(
    zygote: Zygote, tmp_path: Path, strategy: str, shape: str
) -> None:
    """The script may save after the loop or in a `finally` around it."""
    with cluster(
        zygote, tmp_path, script=SCRIPT, SHAPE=shape, STRATEGY=strategy, SHOAL_DRAIN_GRACE_S="20"
    ) as running:
        with running.held():
            for index in range(3):
                running.start(index)
            wait_for_preemption(running)
            results = running.finish(0, 1, 2)
        assert len({r["steps"] for r in results}) == len({r["digest"] for r in results}) == 1
        assert 0 < results[0]["steps"] < ALL
        assert newest_step(running) == results[0]["steps"]


def test_a_rank_that_leaves_alone_saves_nothing_in_finally_and_its_peers_do(
    zygote: Zygote, tmp_path: Path
) -> None:
    """The leaving rank has only a part of an older state."""
    with cluster(zygote, tmp_path, script=SCRIPT, SHAPE="finally", STRATEGY="zero2") as running:
        with running.held():
            for index in range(3):
                running.start(index)
            running.wait_steps(2)
            running.signal(1, signal.SIGTERM)
            assert running.workers[1].wait() == 0, running.workers[1].said()
            assert latest(running.output / "checkpoints") is None
        running.workers.pop(1)
        results = running.finish(0, 2)
        assert [r["steps"] for r in results] == [ALL, ALL]
        assert newest_step(running) == ALL


@pytest.mark.parametrize("strategy", ["zero2", pytest.param("ddp", marks=pytest.mark.matrix)])
def test_a_death_after_the_jobs_last_step_boundary_leaves_all_shards_to_be_saved(
    zygote: Zygote, tmp_path: Path, strategy: str
) -> None:
    """The survivors notice the death before they save."""
    with cluster(zygote, tmp_path, script=SCRIPT, SHAPE="left", STRATEGY=strategy) as running:
        with running.held():
            for index in range(3):
                running.start(index, **({"DIE": "left:0"} if index == 1 else {}))
            running.wait_steps(2)
            running.client.stop_job("job", reason="test")
            results = running.finish(0, 2)
        assert len({r["steps"] for r in results}) == len({r["digest"] for r in results}) == 1
        assert newest_step(running) == results[0]["steps"]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero2", marks=pytest.mark.matrix)])
def test_a_stop_in_a_step_that_one_rank_misses_ends_all_at_one_step_boundary(
    zygote: Zygote, tmp_path: Path, strategy: str
) -> None:
    with cluster(zygote, tmp_path, script=SCRIPT, SHAPE="asks", STRATEGY=strategy) as running:
        for index in range(3):
            running.start(index, SHOAL_FAILPOINTS="step.summed@7=lose" if index == 1 else "")
        results = running.finish(0, 1, 2)
        assert (
            len({str(r["outcomes"]) for r in results}) == len({r["digest"] for r in results}) == 1
        )
        assert results[0]["steps"] == 7


@pytest.mark.parametrize("strategy", ["zero2"])
def test_job_restarted_after_a_preemption_takes_each_sample_once(
    zygote: Zygote, tmp_path: Path, alone: Callable[..., dict[str, Any]], strategy: str
) -> None:
    with cluster(
        zygote,
        tmp_path,
        script=SCRIPT,
        SHAPE="preempted",
        STRATEGY=strategy,
        SHOAL_DRAIN_GRACE_S="20",
    ) as running:
        with running.held():
            for index in range(3):
                running.start(index)
            wait_for_preemption(running)
            first = running.finish(0, 1, 2)
        assert 0 < first[0]["steps"] < ALL
        for index in (3, 4, 5):
            running.start(index)
        again = running.finish(0, 1, 2, 3, 4, 5)[3:]
        expected = alone("flat", strategy)
        assert [(r["steps"], r["lr"]) for r in again] == [(expected["steps"], expected["lr"])] * 3
        assert [r["digest"] for r in again] == [expected["digest"]] * 3
        assert all(epoch.exactly_once for epoch in audit(running.records).epochs)
