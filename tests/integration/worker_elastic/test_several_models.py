"""A generator and a discriminator in one loop: either all updates of a batch count or none, even if
a rank dies between them."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from shoal_worker.data.record import audit

from tests.integration.worker_elastic.cluster import Cluster, cluster
from tests.zygote.children import Zygote

SCRIPT = Path(__file__).parent / "gan.py"
EPOCHS = 3
STEPS = 8 * EPOCHS


MOMENTS = [
    "several_models.updated@10",
    "several_models.prepared@10",
    "several_models.summed@10",
    "session.after_commit@10",
]
QUICK = {
    ("ddp", "several_models.updated@10=kill"),
    ("zero1", "several_models.summed@10=kill"),
    ("zero2", "several_models.updated@10=kill"),
    ("zero3", "several_models.prepared@10=kill"),
    ("ddp", "several_models.summed@10=lose"),
    ("zero3", "several_models.summed@10=lose"),
    ("zero2", "reduction.completed@16=lose"),
    ("tensor", "several_models.updated@10=kill"),
    ("hybrid_zero2", "several_models.summed@10=lose"),
    ("hybrid_fsdp", "several_models.summed@10=lose"),
}
"""Cases that always run; the others are part of `make parity`."""
IN_PARTS = {
    "tensor": ("tensor", {}),
    **{
        f"hybrid_{along}": ("hybrid", {"data_parallel_strategy": along})
        for along in ("ddp", "zero1", "zero2", "fsdp")
    },
}
"""Two ranks form one replica; the discriminator's last layer is too small to be sharded."""


def layout(name: str) -> dict[str, str]:
    """Returns the environment variables of a strategy, or of an entry of `IN_PARTS`."""
    if name not in IN_PARTS:
        return {
            "STRATEGY": name,
            "OPTIONS": json.dumps({"shard_size": 2} if name == "hsdp" else {}),
        }
    strategy, options = IN_PARTS[name]
    return {
        "STRATEGY": strategy,
        "OPTIONS": json.dumps(
            {"tensor_parallel_size": 2, "minimum_parameter_group_size": 20, **options}
        ),
    }


def cases(action: str, strategies: list[str], moments: list[str]) -> list[Any]:
    all_of_them = [
        (strategy, f"{moment}={action}") for strategy in strategies for moment in moments
    ]
    return [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.matrix)
        for case in all_of_them
    ]


def run_alone(zygote: Zygote, directory: Path, **environment: str) -> dict[str, Any]:
    with cluster(
        zygote, directory, max_workers=1, script=SCRIPT, EPOCHS=str(EPOCHS), **environment
    ) as running:
        running.start(0)
        (result,) = running.finish(0)
    return result


@pytest.fixture(scope="module", params=["3", pytest.param("1", marks=pytest.mark.matrix)])
def every(request: pytest.FixtureRequest) -> str:
    """Number of batches per step of the generator."""
    value: str = request.param
    return value


@pytest.fixture(scope="module")
def alone(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory, every: str) -> dict[str, Any]:
    """The result of a run of one worker without a fault."""
    result = run_alone(zygote, tmp_path_factory.mktemp("alone"), EVERY=every)
    assert result["updates"] == [STEPS // int(every), STEPS]
    return result


def check_same_run(results: list[dict[str, Any]], alone: dict[str, Any], running: Cluster) -> None:
    for result in results:
        for name in ("steps", "updates", "lr"):
            assert result[name] == alone[name]
        assert result["parameters"] == results[0]["parameters"]
        for own, expected in zip(result["parameters"], alone["parameters"], strict=True):
            assert own == pytest.approx(expected, rel=1e-8, abs=1e-10)
    verdict = audit(running.records)
    assert len(verdict.epochs) == EPOCHS
    assert all(epoch.exactly_once for epoch in verdict.epochs), verdict


def run_with_a_fault(
    zygote: Zygote, directory: Path, alone: dict[str, Any], failpoint: str, **environment: str
) -> None:
    """Runs three workers and checks the survivors. The second worker is killed at `failpoint`, or
    loses its group there and continues."""
    survivors = (0, 1, 2) if failpoint.endswith("lose") else (0, 2)
    with cluster(zygote, directory, script=SCRIPT, EPOCHS=str(EPOCHS), **environment) as running:
        for index in range(3):
            running.start(index, **({"SHOAL_FAILPOINTS": failpoint} if index == 1 else {}))
        check_same_run(running.finish(*survivors), alone, running)


@pytest.mark.parametrize(
    ("strategy", "failpoint"), cases("kill", ["ddp", "zero1", "zero2", "zero3", "hsdp"], MOMENTS)
)
def test_a_worker_killed_between_two_updates_costs_the_others_nothing(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any], every: str, strategy: str, failpoint: str
) -> None:
    run_with_a_fault(zygote, tmp_path, alone, failpoint, EVERY=every, **layout(strategy))


@contextmanager
def four(
    zygote: Zygote, directory: Path, every: str, strategy: str, failpoint: str
) -> Iterator[Cluster]:
    """Starts four workers, the second with the failpoint set."""
    settings = {"EPOCHS": str(EPOCHS), "EVERY": every, **layout(strategy)}
    with cluster(zygote, directory, max_workers=4, script=SCRIPT, **settings) as running:
        for index in range(4):
            running.start(index, **({"SHOAL_FAILPOINTS": failpoint} if index == 1 else {}))
        yield running


@pytest.mark.parametrize(("strategy", "failpoint"), cases("kill", [*IN_PARTS], MOMENTS))
def test_another_replica_outlives_a_worker_killed_between_two_updates(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any], every: str, strategy: str, failpoint: str
) -> None:
    """After the death of one of four ranks, two of the remaining three have the models. The third
    is a spare and reports no model."""
    with four(zygote, tmp_path, every, strategy, failpoint) as running:
        results = running.finish(0, 2, 3, may_end_well=True)
        assert len(results) == 2
        check_same_run(results, alone, running)


@pytest.mark.parametrize(
    ("strategy", "failpoint"),
    cases(
        "lose",
        [*IN_PARTS],
        [
            "reduction.completed@16",
            "step.summed@16",
            "several_models.prepared@10",
            "several_models.summed@10",
        ],
    ),
)
def test_rank_of_a_replica_that_lost_its_group_repeats_the_actions_of_its_peers(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any], every: str, strategy: str, failpoint: str
) -> None:
    with four(zygote, tmp_path, every, strategy, failpoint) as running:
        check_same_run(running.finish(0, 1, 2, 3), alone, running)


@pytest.mark.parametrize(
    "strategy", ["tensor", pytest.param("hybrid_zero2", marks=pytest.mark.slow)]
)
def test_completed_replica_receives_both_models(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any], every: str, strategy: str
) -> None:
    settings = {"EPOCHS": str(EPOCHS), "EVERY": every, **layout(strategy)}
    with cluster(zygote, tmp_path, max_workers=4, script=SCRIPT, **settings) as running:
        with running.held():
            for index in range(4):
                running.start(index)
            running.wait_steps(4)
            running.signal(1, signal.SIGKILL)
            running.start(4)
            running.wait_ranked(4)
        check_same_run(running.finish(0, 2, 3, 4), alone, running)


@pytest.mark.parametrize(
    ("strategy", "failpoint"),
    cases(
        "lose",
        ["ddp", "zero2", "zero3"],
        ["reduction.completed@16", "several_models.prepared@10", "several_models.summed@10"],
    ),
)
def test_rank_that_lost_its_group_repeats_the_actions_of_its_peers(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any], every: str, strategy: str, failpoint: str
) -> None:
    """The step is committed for all ranks if the rank has received the commit all-reduce."""
    run_with_a_fault(zygote, tmp_path, alone, failpoint, EVERY=every, **layout(strategy))


@pytest.mark.parametrize("failpoint", ["step.summed@14=lose", "several_models.updated@10=kill"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_scale_used_by_an_undone_update_is_undone_too(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any], every: str, strategy: str, failpoint: str
) -> None:
    """Otherwise a rank that has made the update and a rank that has not would continue with
    different scales."""
    run_with_a_fault(
        zygote, tmp_path, alone, failpoint, EVERY=every, SCALED="1", **layout(strategy)
    )


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_replacement_receives_both_models(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any], every: str, strategy: str
) -> None:
    with cluster(
        zygote, tmp_path, script=SCRIPT, EPOCHS=str(EPOCHS), EVERY=every, **layout(strategy)
    ) as running:
        with running.held():
            for index in range(3):
                running.start(index)
            running.wait_steps(4)
            running.signal(1, signal.SIGKILL)
            running.start(3)
            running.wait_ranked(3)
        check_same_run(running.finish(0, 2, 3), alone, running)


@pytest.mark.parametrize(
    ("strategy", "then"),
    [
        ("ddp", "zero3"),
        ("zero2", "tensor"),
        *(
            pytest.param(*each, marks=pytest.mark.matrix)
            for each in (("zero3", "ddp"), ("zero1", "zero1"), ("tensor", "zero2"))
        ),
    ],
)
def test_a_checkpoint_has_both_models(
    zygote: Zygote, tmp_path: Path, alone: dict[str, Any], every: str, strategy: str, then: str
) -> None:
    checkpoints = str(tmp_path / "checkpoints")
    for name, epochs, number, under in (
        ("before", EPOCHS - 1, 2, strategy),
        ("after", EPOCHS, 3, then),
    ):
        (tmp_path / name).mkdir()
        number += under == "tensor" and number == 3
        settings = {
            "EPOCHS": str(epochs),
            "EVERY": every,
            "CHECKPOINTS": checkpoints,
            **layout(under),
        }
        with cluster(
            zygote,
            tmp_path / name,
            min_workers=number,
            max_workers=number,
            script=SCRIPT,
            **settings,
        ) as running:
            for index in range(number):
                running.start(index)
            results = running.finish(*range(number))
    for result in results:
        assert (result["steps"], result["updates"], result["lr"]) == (
            alone["steps"],
            alone["updates"],
            alone["lr"],
        )
        for own, expected in zip(result["parameters"], alone["parameters"], strict=True):
            assert own == pytest.approx(expected, rel=1e-8, abs=1e-10)
