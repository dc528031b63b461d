"""CUDA graphs and the allocator's expandable segments in complete trainings of two workers that
share one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import training
from tests.gpu.devices import is_there, lease_ms, places, sharing
from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote

Starter = Callable[[str], Zygote]
_WORKERS = 2


def train(zygote: Zygote, directory: Path, kind: str, **settings: str) -> list[dict[str, Any]]:
    """Trains and returns the result of each worker."""
    shared = {**settings, **sharing(kind)}
    with cluster(
        zygote,
        directory,
        max_workers=_WORKERS,
        script=Path(training.__file__),
        lease_ms=lease_ms(kind),
        **shared,
    ) as running:
        for index in range(_WORKERS):
            running.start(index)
        return running.finish(*range(_WORKERS))


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """Parameters after the same training in plain torch on the host."""
    return torch.cat([value.flatten() for value in training.alone().values()]).tolist()


@pytest.mark.parametrize(("kind", "backend"), places(quick=True))
def test_a_block_in_a_cuda_graph_changes_nothing(
    starter: Starter, tmp_path: Path, kind: str, backend: str, alone: list[float]
) -> None:
    """A block in a CUDA graph trains as in plain torch. The test uses ddp, which does not move
    parameters."""
    is_there(kind)
    rows = training.BATCH // _WORKERS
    for result in train(
        starter(kind), tmp_path, kind, STRATEGY="ddp", BACKEND=backend, GRAPHED=str(rows)
    ):
        assert result["device"].partition(":")[0] == kind
        assert result["parameters"] == pytest.approx(alone, abs=1e-8)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize(("kind", "backend"), places(quick=False))
def test_expandable_segments_change_nothing(
    starter: Starter, tmp_path: Path, kind: str, backend: str, strategy: str, alone: list[float]
) -> None:
    is_there(kind)
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for result in train(
        starter(kind), tmp_path, kind, STRATEGY=strategy, BACKEND=backend, **allocator
    ):
        assert result["expandable"] == (kind == "cuda")
        assert result["parameters"] == pytest.approx(alone, abs=1e-8)
