"""local_sgd on real ranks ends as replicas in one process do that average by hand (1e-10 in float64), whatever happens on the way, and
every sample counts exactly once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_worker.data.record import audit
from shoal_worker.elastic.step import CONTROL_LENGTH

from tests.integration.worker_async.async_cluster import Zygote
from tests.integration.worker_elastic.cluster import Cluster, cluster
from tests.integration.worker_elastic.local_sgd_simulation import RECIPES, State, simulate, whole_batches

SCRIPT = Path(__file__).with_name("local_sgd_ranks.py")


def differences(result: dict[str, Any], expected: State) -> dict[str, float]:
    """What is not as expected, and by how much."""
    assert result["state"].keys() == expected.keys()
    off = {name: float((torch.tensor(value, dtype=torch.float64) - expected[name]).abs().max()) for name, value in result["state"].items()}
    return {name: by for name, by in off.items() if not by <= 1e-10}


def run(zygote: Zygote, directory: Path, recipe: str, failpoints: Sequence[str], survivors: Sequence[int], **more: str) -> list[Any]:
    """The results of the survivors of one run; each sample has counted once."""
    with cluster(zygote, directory, max_workers=len(failpoints), script=SCRIPT, RECIPES=recipe, **more) as running:
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
def ranks(request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[dict[str, Any]]]:
    """All recipes by ranks of one number, one after the other."""
    world = request.param
    directory = tmp_path_factory.mktemp("local-sgd")
    with cluster(zygote, directory, max_workers=world, script=SCRIPT, RECIPES=",".join(RECIPES), WORLD=str(world)) as running:
        for index in range(world):
            running.start(index)
        return world, running.finish(*range(world))


@pytest.mark.parametrize("name", RECIPES)
def test_ranks_end_as_replicas_in_one_process(ranks: tuple[int, list[dict[str, Any]]], name: str) -> None:
    world, results = ranks
    expected = simulate(RECIPES[name], world)
    assert [differences(result[name], expected) for result in results] == [{}] * world


def test_an_average_in_each_step_of_plain_sgd_is_ddp(ranks: tuple[int, list[dict[str, Any]]]) -> None:
    expected = whole_batches(RECIPES["each_step"])
    assert [differences(result["each_step"], expected) for result in ranks[1]] == [{}] * ranks[0]


def test_bytes_are_sent_at_a_rounds_end_alone(ranks: tuple[int, list[dict[str, Any]]]) -> None:
    parameters = sum(p.numel() * p.element_size() for p in RECIPES["momentum"].net().parameters())
    control = (CONTROL_LENGTH + 1) * 8  # and the weight of the rank's samples
    for result in ranks[1]:
        sent = result["momentum"]["bytes"]
        assert [n > 0 for n in sent] == [False, False, True, False, False, True] * 2  # six steps an epoch
        assert all(parameters <= n <= parameters + control for n in sent if n)
