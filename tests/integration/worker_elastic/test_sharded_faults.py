"""Strategies with sharded state lose nothing if a rank dies, because mirrors replace its shard.
Every run ends bit for bit like the run of one worker."""

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.worker_elastic import few_micro_batches, sharded_state
from tests.integration.worker_elastic.cluster import Cluster, cluster
from tests.integration.worker_elastic.test_faults import EPOCHS, check_same_run
from tests.zygote.children import Zygote, eventually


@pytest.fixture(scope="module")
def alone(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of a run of one worker without a fault; all three ZeRO stages compute the same
    values."""
    with cluster(
        zygote,
        tmp_path_factory.mktemp("alone"),
        max_workers=1,
        EPOCHS=str(EPOCHS),
        MICRO="1",
        STRATEGY="zero1",
    ) as running:
        running.start(0)
        (result,) = running.finish(0)
    return result


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_three_workers_end_with_the_parameters_of_one(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any], strategy: str
) -> None:
    with cluster(zygote, tmp_path, EPOCHS=str(EPOCHS), MICRO="1", STRATEGY=strategy) as running:
        for index in range(3):
            running.start(index)
        check_same_run(running.finish(0, 1, 2), alone, running)


@pytest.mark.parametrize(
    ("strategy", "failpoint"),
    [
        ("zero1", "sharded.prepared@15=kill"),
        pytest.param("zero2", "reduction.completed@15=kill", marks=pytest.mark.matrix),
        ("zero3", "session.before_apply@15=kill"),
        ("zero1", "session.after_apply@15=kill"),
        pytest.param("zero3", "session.after_commit@40=kill", marks=pytest.mark.matrix),
        ("zero3", "session.in_operation@3=kill"),
        pytest.param("zero2", "session.after_operation@4=kill", marks=pytest.mark.matrix),
    ],
)
def test_a_worker_killed_at_any_moment_costs_the_others_nothing(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any], strategy: str, failpoint: str
) -> None:
    with cluster(zygote, tmp_path, EPOCHS=str(EPOCHS), MICRO="1", STRATEGY=strategy) as running:
        running.start(0)
        running.start(1, SHOAL_FAILPOINTS=failpoint)
        running.start(2)
        check_same_run(running.finish(0, 2), alone, running)


@pytest.fixture(scope="module")
def alone_with_adafactor(
    zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The result of a run of one worker, with an optimizer that needs unsharded tensors."""
    settings = {"EPOCHS": str(EPOCHS), "MICRO": "1", "STRATEGY": "zero1", "OPTIMIZER": "Adafactor"}
    with cluster(
        zygote, tmp_path_factory.mktemp("adafactor"), max_workers=1, **settings
    ) as running:
        running.start(0)
        (result,) = running.finish(0)
    return result


@pytest.mark.parametrize(
    ("strategy", "failpoint"),
    [
        ("zero1", "session.after_apply@15=kill"),
        pytest.param("zero2", "sharded.prepared@15=kill", marks=pytest.mark.matrix),
        ("zero3", "session.in_operation@3=kill"),
        pytest.param("fsdp", "session.after_commit@40=kill", marks=pytest.mark.matrix),
    ],
)
def test_death_costs_nothing_with_an_optimizer_of_unsharded_tensors(
    zygote: Zygote,
    tmp_path: Path,
    alone_with_adafactor: dict[str, Any],
    strategy: str,
    failpoint: str,
) -> None:
    with cluster(
        zygote, tmp_path, EPOCHS=str(EPOCHS), MICRO="1", STRATEGY=strategy, OPTIMIZER="Adafactor"
    ) as running:
        running.start(0)
        running.start(1, SHOAL_FAILPOINTS=failpoint)
        running.start(2)
        check_same_run(running.finish(0, 2), alone_with_adafactor, running)


@pytest.mark.parametrize("strategy", [pytest.param("zero1", marks=pytest.mark.matrix), "fsdp"])
def test_joiner_receives_the_tensors_it_will_own_and_a_leaving_rank_hands_its_own_over(
    zygote: Zygote, tmp_path: Path, alone_with_adafactor: dict[str, Any], strategy: str
) -> None:
    with cluster(
        zygote, tmp_path, EPOCHS=str(EPOCHS), MICRO="1", STRATEGY=strategy, OPTIMIZER="Adafactor"
    ) as running:
        with running.held():
            for index in range(3):
                running.start(index)
            running.wait_steps(1)
            running.signal(1, signal.SIGKILL)
            running.start(3)
            running.wait_ranked(3)
            running.wait_steps(running.steps() + 1)
            running.signal(2, signal.SIGTERM)
            assert running.workers.pop(2).wait() == 0
        check_same_run(running.finish(0, 3), alone_with_adafactor, running)


def test_state_of_a_dead_replica_rank_survives_in_the_other_replica(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any]
) -> None:
    with cluster(
        zygote, tmp_path, max_workers=4, EPOCHS=str(EPOCHS), MICRO="1", STRATEGY="hsdp"
    ) as running:
        for index in range(4):
            running.start(
                index,
                **({"SHOAL_FAILPOINTS": "session.before_apply@15=kill"} if index == 1 else {}),
            )
        check_same_run(running.finish(0, 2, 3), alone, running)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_rank_that_missed_the_commit_all_reduce_applies_the_step_if_a_peer_has(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any], strategy: str
) -> None:
    with cluster(zygote, tmp_path, EPOCHS=str(EPOCHS), MICRO="1", STRATEGY=strategy) as running:
        running.start(0)
        running.start(1, SHOAL_FAILPOINTS="reduction.completed@15=lose")
        running.start(2)
        results = running.finish(0, 1, 2)
        assert results[1]["lost"] == 1
        check_same_run(results, alone, running)


def test_replacement_receives_its_shards_and_a_drained_worker_leaves_its_own_behind(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any]
) -> None:
    with cluster(zygote, tmp_path, EPOCHS=str(EPOCHS), MICRO="1", STRATEGY="zero3") as running:
        with running.held():
            for index in range(3):
                running.start(index)
            running.wait_steps(1)
            running.signal(1, signal.SIGKILL)
            running.start(3)
            running.wait_ranked(3)
            running.wait_steps(running.steps() + 1)
            running.signal(2, signal.SIGTERM)
            assert running.workers.pop(2).wait() == 0
        check_same_run(running.finish(0, 3), alone, running)


def test_a_checkpoint_of_one_strategy_is_resumed_by_another_on_other_ranks(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any]
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    saved = {"MICRO": "1", "CHECKPOINTS": str(tmp_path / "checkpoints")}
    with cluster(zygote, tmp_path / "first", EPOCHS="2", STRATEGY="zero3", **saved) as running:
        for index in range(3):
            running.start(index)
        running.finish(0, 1, 2)
    with cluster(
        zygote, tmp_path / "second", max_workers=2, EPOCHS=str(EPOCHS), STRATEGY="zero1", **saved
    ) as running:
        for index in range(2):
            running.start(index)
        results = running.finish(0, 1)
    assert {r["digest"] for r in results} == {alone["digest"]}


def test_a_worker_killed_while_writing_its_checkpoint_shard_leaves_the_previous_one_as_the_newest(
    zygote: Zygote, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    with cluster(
        zygote, tmp_path, EPOCHS="2", STRATEGY="zero3", CHECKPOINTS=str(checkpoints)
    ) as running:
        for index in range(3):
            running.start(
                index,
                **({"SHOAL_FAILPOINTS": "checkpoint.shard_written@2=kill"} if index == 1 else {}),
            )
        for index in (0, 2):  # the rank that completes the checkpoint, and one that waits for it
            eventually(running.workers[index].ended.is_set, "the survivors' end")
            assert (
                "this worker failed: the last checkpoint was not saved"
                in running.workers[index].said()
            )
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-10"]
    assert len(list((checkpoints / "step-10").glob("shard-*-of-00003.safetensors"))) == 3


def test_checkpoint_of_a_job_on_hold_does_not_wait_for_the_shard_of_a_dead_rank(
    zygote: Zygote, tmp_path: Path
) -> None:
    """No generation forms without the dead rank, because too few are left."""
    with cluster(
        zygote,
        tmp_path,
        min_workers=2,
        max_workers=2,
        EPOCHS="2",
        STRATEGY="zero3",
        CHECKPOINTS=str(tmp_path / "checkpoints"),
    ) as running:
        running.start(0)
        running.start(1, SHOAL_FAILPOINTS="checkpoint.shard_written@1=kill")
        eventually(
            lambda: "was abandoned: a rank was lost" in running.workers[0].said(),
            "the first rank to give the checkpoint up",
        )


NEIGHBOURS = (1, 2)
"""Two of four ranks, one of which mirrors the other's shard."""


def start_with_neighbours_that_stop(running: Cluster, moment: str) -> None:
    for index in range(4):
        running.start(
            index, **({"SHOAL_FAILPOINTS": f"{moment}=stop"} if index in NEIGHBOURS else {})
        )


def kill_two_neighbours(running: Cluster, moment: str) -> None:
    """Kills two neighbouring ranks once both are stopped at `moment`."""
    processes = [psutil.Process(running.workers[index].pid) for index in NEIGHBOURS]
    eventually(
        lambda: all(process.status() == psutil.STATUS_STOPPED for process in processes),
        f"both at {moment}",
    )
    for index in NEIGHBOURS:
        running.signal(index, signal.SIGKILL)


def test_simultaneous_death_of_two_neighbours_is_a_loss_that_is_named(
    zygote: Zygote, tmp_path: Path
) -> None:
    with cluster(
        zygote,
        tmp_path,
        max_workers=4,
        lease_ms=60_000,
        EPOCHS=str(EPOCHS),
        MICRO="1",
        STRATEGY="zero3",
    ) as running:
        start_with_neighbours_that_stop(running, "session.before_apply@15")
        kill_two_neighbours(running, "session.before_apply@15")
        for index in (0, 3):
            eventually(running.workers[index].ended.is_set, "the survivors' end")
        output = "".join(path.read_text() for path in tmp_path.rglob("*.log"))
        assert "of the model's 4 shards any more" in output


@pytest.mark.parametrize(
    "moment",
    ["session.before_apply@15", pytest.param("session.after_commit@15", marks=pytest.mark.matrix)],
)
def test_simultaneous_death_of_two_neighbours_returns_the_run_to_the_newest_checkpoint(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any], moment: str
) -> None:
    checkpoints = tmp_path / "checkpoints"
    settings = {
        "EPOCHS": str(EPOCHS),
        "MICRO": "1",
        "STRATEGY": "zero3",
        "CHECKPOINTS": str(checkpoints),
    }
    with cluster(zygote, tmp_path, max_workers=4, lease_ms=60_000, **settings) as running:
        with running.held(before=12):
            # ranks write their parts in the background, and the neighbours may be stopped before
            # theirs are on disk
            start_with_neighbours_that_stop(running, moment)
            eventually((checkpoints / "step-10").is_dir, "a checkpoint to go back to")
        kill_two_neighbours(running, moment)
        for result in running.finish(0, 3):
            assert {name: result[name] for name in ("steps", "digest", "lr", "evaluations")} == {
                name: alone[name] for name in ("steps", "digest", "lr", "evaluations")
            }
            assert result["lost"] == 1
        assert "returning to the newest checkpoint" in running.said()


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_full_state_matches_one_process_and_can_be_loaded_again(
    zygote: Zygote, tmp_path: Path, strategy: str
) -> None:
    with cluster(
        zygote, tmp_path, script=Path(sharded_state.__file__), STRATEGY=strategy
    ) as running:
        for index in range(3):
            running.start(index)
        assert [running.workers[index].wait() for index in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_rank_may_have_no_micro_batch_in_any_step(
    zygote: Zygote, tmp_path: Path, strategy: str
) -> None:
    with cluster(
        zygote, tmp_path, script=Path(few_micro_batches.__file__), STRATEGY=strategy
    ) as running:
        for index in range(3):
            running.start(index)
        assert [running.workers[index].wait() for index in range(3)] == [0, 0, 0]
