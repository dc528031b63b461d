"""Runs a case on all ranks of one group: on processes, which serve all tests of a session, or on
threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from shoal_worker.launch import launch
from torch.distributed.device_mesh import init_device_mesh

from tests.integration.tensor_parallel.ranks import CASES, WORLD
from tests.ranks.processes import Rank, RankPool, run_task

_TASKS = "tests.integration.tensor_parallel.ranks"


@pytest.fixture(scope="session")
def _ranks(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Rank]]:
    with rank_pool.taking() as take:
        ranks = take(WORLD)
        run_task(ranks, f"{_TASKS}:join", directory=str(tmp_path_factory.mktemp("tensor-parallel")))
        yield ranks
        for rank in ranks:
            rank.end()  # no other test can use a rank of this world


@pytest.fixture
def run(_ranks: list[Rank]) -> Callable[..., list[Any]]:
    """run(case, size, **arguments) -> the results of four ranks, which form groups of
    `size` ranks."""

    def run(case: str, size: int, **arguments: Any) -> list[Any]:
        return list(
            run_task(
                _ranks, f"{_TASKS}:run_case", case=case, size=size, arguments=arguments
            ).values()
        )

    return run


@pytest.fixture
def run_threads() -> Callable[..., None]:
    """run_threads(case, **arguments): runs a case on two ranks that are threads of this process,
    which is faster."""

    def run(case: str, **arguments: Any) -> None:
        launch(
            lambda: CASES[case](init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), **arguments),
            world_size=2,
        )

    return run
