"""tensor, pipeline and hybrid in a job: full replicas may leave. Left-over ranks wait as spares,
and take part again when there are enough for a replica."""

import json
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import shoal
from shoal_common.exit_status import EVICTED
from shoal_worker.data.record import audit

from tests.integration.worker_elastic import mesh_train
from tests.integration.worker_elastic.cluster import Cluster, cluster
from tests.zygote.children import Zygote, eventually

EPOCHS = 6
SCRIPT = Path(mesh_train.__file__)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The result of a run of one rank without a fault."""
    (result,) = shoal.launch(lambda: mesh_train.train("ddp", {}, EPOCHS), world_size=1)
    return result


def check_same_run(results: list[dict[str, Any]], alone: dict[str, Any], running: Cluster) -> None:
    verdict = audit(running.records)
    assert len(verdict.epochs) == EPOCHS
    assert all(epoch.exactly_once for epoch in verdict.epochs), verdict
    for result in results:
        assert result["steps"] == alone["steps"]
        assert result["lr"] == alone["lr"]
        assert result["evaluation"] == pytest.approx(alone["evaluation"], rel=1e-6)
        assert result["parameters"] == pytest.approx(alone["parameters"], abs=1e-8)
        assert result["moments"] == pytest.approx(alone["moments"], rel=1e-6)


def start(running: Cluster, workers: int, **failing: str) -> None:
    for index in range(workers):
        running.start(
            index,
            **({"SHOAL_FAILPOINTS": failing[f"of_{index}"]} if f"of_{index}" in failing else {}),
        )


def hybrid_of_four(
    zygote: Zygote, directory: Path, micro: int | None = None, **options: Any
) -> AbstractContextManager[Cluster]:
    settings = {"EPOCHS": str(EPOCHS), "STRATEGY": "hybrid", "OPTIONS": json.dumps(options)}
    if micro is not None:
        settings["MICRO"] = str(micro)
    return cluster(zygote, directory, max_workers=4, script=SCRIPT, **settings)


@pytest.mark.parametrize(
    ("leaves", "data_axis"),
    [
        pytest.param(signal.SIGKILL, "ddp", marks=pytest.mark.matrix),
        pytest.param(signal.SIGTERM, "ddp", marks=pytest.mark.matrix),
        pytest.param(signal.SIGKILL, "zero2", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, "fsdp", marks=pytest.mark.matrix),
        pytest.param(signal.SIGTERM, "fsdp", marks=pytest.mark.matrix),
    ],
)
def test_remaining_rank_of_a_broken_replica_is_a_spare_until_a_joiner_completes_it(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any], leaves: signal.Signals, data_axis: str
) -> None:
    with hybrid_of_four(
        zygote, tmp_path, tensor_parallel_size=2, data_parallel_strategy=data_axis
    ) as running:
        with running.held():
            # The death is within a step: at an evaluation the spare rank would exit, so that a
            # launcher restarts it.
            in_a_step = (
                {"SHOAL_FAILPOINTS": "session.before_apply@3=kill"}
                if leaves is signal.SIGKILL
                else {}
            )
            for index in range(4):
                running.start(index, **(in_a_step if index == 1 else {}))
            running.wait_steps(2)
            if not in_a_step:
                running.signal(1, leaves)
            eventually(lambda: "this rank is a spare" in running.said(), "a spare")
            running.wait_steps(running.steps() + 1)
            running.start(4)
            running.wait_ranked(4)
        running.workers.pop(1).wait()
        results = running.finish(0, 2, 3, 4)
        assert [result["replicas"] for result in results] == [2] * 4
        check_same_run(results, alone, running)


@pytest.mark.slow
def test_rank_left_over_at_the_start_is_a_spare_until_a_joiner_completes_a_replica(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any]
) -> None:
    settings = {
        "EPOCHS": str(EPOCHS),
        "STRATEGY": "hybrid",
        "OPTIONS": json.dumps({"tensor_parallel_size": 2}),
    }
    with cluster(
        zygote, tmp_path, min_workers=3, max_workers=4, join_grace_ms=1, script=SCRIPT, **settings
    ) as running:
        with running.held():
            start(running, 3)
            running.wait_steps(2)
            assert "this rank is a spare" in running.said()
            running.start(3)
            running.wait_ranked(3)
        results = running.finish(0, 1, 2, 3)
        assert [result["replicas"] for result in results] == [2] * 4
        check_same_run(results, alone, running)


def test_survivor_of_a_death_in_the_first_step_keeps_the_entire_model_until_a_joiner_arrives(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any]
) -> None:
    settings = {
        "EPOCHS": str(EPOCHS),
        "STRATEGY": "hybrid",
        "OPTIONS": json.dumps({"tensor_parallel_size": 2}),
    }
    with cluster(
        zygote, tmp_path, min_workers=1, max_workers=2, script=SCRIPT, **settings
    ) as running:
        start(running, 2, of_1="sharded.prepared@1=kill")
        running.workers.pop(1).wait()
        running.start(2)
        results = running.finish(0, 2)
        assert [result["replicas"] for result in results] == [1] * 2
        check_same_run(results, alone, running)


def test_fewer_ranks_than_a_replica_has_are_refused(zygote: Zygote, tmp_path: Path) -> None:
    settings = {
        "EPOCHS": "1",
        "STRATEGY": "tensor",
        "OPTIONS": json.dumps({"tensor_parallel_size": 4}),
    }
    with cluster(zygote, tmp_path, join_grace_ms=1, script=SCRIPT, **settings) as running:
        running.start(0)
        running.finish()
        assert "1 rank(s) are fewer than the 4 that one replica needs" in running.said()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "failpoint",
    ["sharded.prepared@7=kill", "session.before_apply@7=kill", "session.in_operation@2=kill"],
)
@pytest.mark.parametrize("data_axis", ["ddp", "zero1", "fsdp"])
def test_replicas_outlive_a_rank_killed_at_any_moment(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any], failpoint: str, data_axis: str
) -> None:
    with hybrid_of_four(
        zygote,
        tmp_path,
        pipeline_parallel_size=2,
        schedule="zero_bubble",
        data_parallel_strategy=data_axis,
    ) as running:
        start(running, 4, of_2=failpoint)
        if "in_operation" in failpoint:
            # the spare rank is in the operation too, and exits so that a launcher restarts it
            assert running.workers.pop(3).wait() == EVICTED
            results = running.finish(0, 1)
        else:
            results = running.finish(0, 1, 3, may_end_well=True)
    assert len(results) == 2, (
        "the third was a spare when the run ended, and says nothing of a model that it does not "
        "hold"
    )
    check_same_run(results, alone, running)


@pytest.mark.slow
@pytest.mark.parametrize("data_axis", ["fsdp"])
def test_committed_step_counts_on_the_mesh_rank_that_missed_the_commit_all_reduce(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any], data_axis: str
) -> None:
    with hybrid_of_four(
        zygote, tmp_path, tensor_parallel_size=2, data_parallel_strategy=data_axis
    ) as running:
        start(running, 4, of_1="step.summed@7=lose")
        results = running.finish(0, 1, 2, 3)
    assert len({result["lost"] for result in results}) == 1
    check_same_run(results, alone, running)


@pytest.mark.matrix
@pytest.mark.parametrize("data_axis", ["ddp", "zero1", "zero2", "fsdp"])
def test_rank_that_missed_the_commit_all_reduce_applies_the_step_if_a_peer_has(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any], data_axis: str
) -> None:
    with hybrid_of_four(
        zygote, tmp_path, tensor_parallel_size=2, data_parallel_strategy=data_axis
    ) as running:
        start(running, 4, of_1="reduction.completed@7=lose")
        results = running.finish(0, 1, 2, 3)
    assert results[1]["lost"] == 1
    check_same_run(results, alone, running)


@pytest.mark.matrix
@pytest.mark.parametrize("data_axis", ["ddp", "zero1", "fsdp"])
def test_second_death_while_ranks_are_reassigned_loses_no_part_that_still_exists(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any], data_axis: str
) -> None:
    """Worker 0 has one part. Worker 3, which is a spare in the generation that fails, has the
    other."""
    with hybrid_of_four(
        zygote, tmp_path, tensor_parallel_size=2, data_parallel_strategy=data_axis
    ) as running:
        start(running, 4, of_2="sharded.prepared@7=kill", of_1="mesh.dividing@2=kill")
        check_same_run(running.finish(0, 3), alone, running)


@pytest.mark.matrix
def test_ranks_without_samples_do_not_learn_the_passes_of_a_lost_step(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any]
) -> None:
    """There are two micro-batches for four replicas, so two replicas repeat the passes of the
    others."""
    with hybrid_of_four(zygote, tmp_path, micro=4, data_parallel_strategy="fsdp") as running:
        start(running, 4, of_3="session.after_commit@1=kill")
        check_same_run(running.finish(0, 1, 2), alone, running)


@pytest.mark.matrix
def test_replicas_on_several_hosts_learn_the_passes_together(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any]
) -> None:
    """Ranks on the same host are neighbours. After the join, all replicas of one part know the
    passes already, and those of the other part do not."""
    options = json.dumps({"tensor_parallel_size": 2, "data_parallel_strategy": "fsdp"})
    settings = {"EPOCHS": str(EPOCHS), "STRATEGY": "hybrid", "OPTIONS": options, "MICRO": "2"}
    with cluster(
        zygote,
        tmp_path,
        min_workers=2,
        max_workers=4,
        join_grace_ms=1000,
        script=SCRIPT,
        **settings,
    ) as running:
        with running.held():
            for index, host in enumerate("ab"):
                running.start(index, SHOAL_HOST=host)
            running.wait_steps(2)
            for index, host in enumerate("ab", start=2):
                running.start(index, SHOAL_HOST=host)
            for joiner in (2, 3):
                running.wait_ranked(joiner)
        check_same_run(running.finish(0, 1, 2, 3), alone, running)


@pytest.mark.matrix
def test_model_with_a_lost_part_goes_back_to_the_newest_checkpoint(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    places = {"CHECKPOINTS": str(checkpoints)}
    with cluster(
        zygote,
        tmp_path,
        max_workers=2,
        script=SCRIPT,
        EPOCHS=str(EPOCHS),
        STRATEGY="tensor",
        OPTIONS="{}",
        **places,
    ) as running:
        with running.held(before=6):  # the killed rank may not have written its part yet
            start(running, 2, of_1="session.before_apply@7=kill")
            eventually(lambda: any(checkpoints.glob("step-*")), "a checkpoint to go back to")
        check_same_run(running.finish(0), alone, running)
