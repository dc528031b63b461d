"""Common uses of torch's DDP, on two ranks with ddp, have the result of one process on the full
batch, to 1e-10 in float64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.worker_elastic.cluster import cluster
from tests.integration.worker_elastic.ddp_ranks import CASES, WORLD
from tests.zygote.children import Zygote


@pytest.fixture(scope="module")
def outcomes(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The outcomes by rank and case. All cases run in one pair of processes, one after the
    other."""
    script = Path(__file__).with_name("ddp_ranks.py")
    with cluster(
        zygote,
        tmp_path_factory.mktemp("ddp"),
        max_workers=WORLD,
        script=script,
        SHOAL_RENDEZVOUS_TIMEOUT_S="60",
    ) as running:
        for index in range(WORLD):
            running.start(index)
        for index in range(WORLD):
            assert running.workers[index].wait() == 0, running.workers[index].said()
        return [
            json.loads((running.output / f"{index}.json").read_text()) for index in range(WORLD)
        ]


@pytest.mark.parametrize("name", CASES)
def test_the_ranks_end_as_one_process_does(outcomes: list[dict[str, str]], name: str) -> None:
    assert [received[name] for received in outcomes] == [""] * WORLD
