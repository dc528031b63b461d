"""local_sgd on real ranks ends like replicas in one process that are averaged by hand (1e-10 in
float64), with and without faults, and every sample counts exactly once."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal_worker.data.record import audit
from shoal_worker.elastic.contract.step import CONTROL_LENGTH

from tests.integration.worker_elastic.cluster import Cluster, cluster
from tests.integration.worker_elastic.local_sgd_ranks import CHECKPOINT_AT
from tests.integration.worker_elastic.local_sgd_simulation import (
    RECIPES,
    State,
    simulate,
    whole_batches,
)
from tests.zygote.children import Zygote

SCRIPT = Path(__file__).with_name("local_sgd_ranks.py")


pytestmark = pytest.mark.usefixtures("fresh_session")


def differences(result: dict[str, Any], expected: State) -> dict[str, float]:
    """Returns the largest error of each tensor that differs from the expected one."""
    assert result["state"].keys() == expected.keys()
    off = {
        name: float((torch.tensor(value, dtype=torch.float64) - expected[name]).abs().max())
        for name, value in result["state"].items()
    }
    return {name: by for name, by in off.items() if not by <= 1e-10}


def run(
    zygote: Zygote,
    directory: Path,
    recipe: str,
    failpoints: Sequence[str],
    survivors: Sequence[int],
    **more: str,
) -> list[Any]:
    """Runs one recipe, checks that each sample counted once, and returns the survivors' results."""
    with cluster(
        zygote, directory, max_workers=len(failpoints), script=SCRIPT, RECIPES=recipe, **more
    ) as running:
        for index, failpoint in enumerate(failpoints):
            running.start(index, SHOAL_FAILPOINTS=failpoint)
        results = [result[recipe] for result in running.finish(*survivors)]
        check_counted(running, recipe, results)
    return results


def check_counted(running: Cluster, recipe: str, results: Sequence[dict[str, Any]]) -> None:
    verdict = audit(running.records)
    assert len(verdict.epochs) == RECIPES[recipe].epochs
    assert verdict.exactly_once, verdict
    steps = RECIPES[recipe].epochs * -(-RECIPES[recipe].samples // RECIPES[recipe].batch)
    assert [(r["steps"], r["scheduled"]) for r in results] == [(steps, steps)] * len(results)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, list[dict[str, Any]]]:
    """World size, and the results of all recipes, which run one after the other on the same
    ranks."""
    world = request.param
    directory = tmp_path_factory.mktemp("local-sgd")
    with cluster(
        zygote,
        directory,
        max_workers=world,
        script=SCRIPT,
        RECIPES=",".join(RECIPES),
        WORLD=str(world),
    ) as running:
        for index in range(world):
            running.start(index)
        return world, running.finish(*range(world))


@pytest.mark.parametrize("name", RECIPES)
def test_ranks_end_as_replicas_in_one_process(
    ranks: tuple[int, list[dict[str, Any]]], name: str
) -> None:
    world, results = ranks
    expected = simulate(RECIPES[name], world)
    assert [differences(result[name], expected) for result in results] == [{}] * world


def test_averaging_plain_sgd_in_each_step_equals_ddp(
    ranks: tuple[int, list[dict[str, Any]]],
) -> None:
    expected = whole_batches(RECIPES["each_step"])
    assert [differences(result["each_step"], expected) for result in ranks[1]] == [{}] * ranks[0]


def test_bytes_are_sent_only_at_the_end_of_a_round(ranks: tuple[int, list[dict[str, Any]]]) -> None:
    parameters = sum(p.numel() * p.element_size() for p in RECIPES["momentum"].net().parameters())
    control = (CONTROL_LENGTH + 1) * 8  # plus the weight of the rank's samples
    for result in ranks[1]:
        sent = result["momentum"]["bytes"]
        # six steps per epoch
        assert [n > 0 for n in sent] == [False, False, True, False, False, True] * 2
        assert all(parameters <= n <= parameters + control for n in sent if n)


@pytest.mark.parametrize("recipe", ["statistics", "micro_batches"])
def test_round_whose_average_reached_nobody_is_repeated_from_its_start(
    zygote: Zygote, tmp_path: Path, recipe: str
) -> None:
    lose = "reduction.completed@2=lose"
    results = run(zygote, tmp_path, recipe, [lose, lose], (0, 1))
    assert [r["lost"] for r in results] == [1, 1]
    assert [differences(r, simulate(RECIPES[recipe], 2)) for r in results] == [{}, {}]


@pytest.mark.parametrize("failpoint", ["reduction.completed@2=lose", "step.summed@2=lose"])
def test_a_round_that_one_rank_lost_counts_on_all_ranks_or_on_none(
    zygote: Zygote, tmp_path: Path, failpoint: str
) -> None:
    """The other ranks, if they have already committed this round, lose the next one together with
    that rank."""
    recipe = "outer_momentum"
    results = run(zygote, tmp_path, recipe, ["", failpoint, ""], (0, 1, 2))
    assert [r["lost"] for r in results] == [1, 1, 1]
    assert [differences(r, simulate(RECIPES[recipe], 3)) for r in results] == [{}] * 3


@pytest.mark.parametrize(
    ("failpoint", "evaluates"),
    [("session.after_commit@4=kill", ""), ("session.in_operation@9=kill", "1")],
)
def test_round_with_a_killed_rank_is_repeated_entirely_by_the_others(
    zygote: Zygote, tmp_path: Path, failpoint: str, evaluates: str
) -> None:
    results = run(zygote, tmp_path, "plain", ["", failpoint, ""], (0, 2), EVALUATE=evaluates)
    assert {r["world"] for r in results} == {2}
    assert [differences(r, simulate(RECIPES["plain"], 3, then=(3, 2))) for r in results] == [{}, {}]


def test_evaluations_and_saves_within_a_round_use_the_ranks_mean_and_change_nothing(
    zygote: Zygote, tmp_path: Path
) -> None:
    recipe = RECIPES["momentum"]
    first, second = run(zygote, tmp_path, "momentum", ["", ""], (0, 1), EVALUATE="1")
    assert first["evaluations"] == second["evaluations"]
    assert [(samples, steps) for _, samples, steps, _ in first["evaluations"]] == [
        (36, n) for n in (1, 2, 0)
    ] * 4
    assert differences(first, simulate(recipe, 2)) == {}
    expected = simulate(recipe, 2, steps=CHECKPOINT_AT)
    net = recipe.net()
    model, _ = shoal.as_distributed(net, recipe.optimizer(net), strategy="ddp")
    model.load_model(tmp_path / "output" / "model")
    assert all(
        torch.allclose(value, expected[name], rtol=0, atol=1e-10)
        for name, value in net.state_dict().items()
    )
    model.with_parameters({name: torch.zeros_like(p) for name, p in net.named_parameters()})
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(*recipe.data()),
        global_batch_size=recipe.batch,
        shuffle=False,
    )
    assert shoal.resume(tmp_path / "output" / "checkpoints")
    assert loader.global_step == CHECKPOINT_AT
    assert all(
        torch.allclose(value, expected[name], rtol=0, atol=1e-10)
        for name, value in net.state_dict().items()
    )


def test_workers_join_and_leave_at_the_ends_of_rounds(zygote: Zygote, tmp_path: Path) -> None:
    with cluster(
        zygote,
        tmp_path,
        max_workers=3,
        min_workers=2,
        join_grace_ms=0,
        script=SCRIPT,
        RECIPES="long",
    ) as running:
        with running.held():
            for index in range(2):
                running.start(index)
            running.wait_steps(1)
            running.start(2)
            running.wait_ranked(2)
            running.signal(0, signal.SIGTERM)
            assert running.workers.pop(0).wait() == 0
        results = [result["long"] for result in running.finish(1, 2)]
        check_counted(running, "long", results)
    assert [(r["lost"], r["world"]) for r in results] == [(0, 2)] * 2
    assert results[0]["state"] == results[1]["state"]
    assert {r["state_entries"] for r in results} == {4}
