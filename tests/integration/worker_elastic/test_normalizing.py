"""SyncBatchNorm under faults: a rank that dies in the middle of a pass costs a step that is done again, and the result is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote

SCRIPT = Path(__file__).with_name("normalizes.py")
STEPS = 18
GATHERS = 4
"""How often the ranks gather in one step: once in each of two layers' forward and backward passes. The first step has numbers 1 to 4."""


def trained(zygote: Zygote, directory: Path, strategy: str, *, kill: int | None = None) -> list[dict[str, Any]]:
    directory.mkdir()
    with cluster(zygote, directory, script=SCRIPT) as running:
        failpoints = {} if kill is None else {"SHOAL_FAILPOINTS": f"norms.before_gather@{kill}=kill"}
        running.start(0, STRATEGY=strategy)
        running.start(1, STRATEGY=strategy, **failpoints)
        running.start(2, STRATEGY=strategy)
        results: list[dict[str, Any]] = running.finish(*((0, 1, 2) if kill is None else (0, 2)))
    return results


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_in_a_pass_leaves_the_others_with_the_same_model(zygote: Zygote, tmp_path: Path, strategy: str) -> None:
    undisturbed = trained(zygote, tmp_path / "undisturbed", strategy)[0]
    assert all(torch.tensor(values).isfinite().all() for values in undisturbed["trained"].values())
    for place in (1, 4):  # in the forward pass; in the backward pass
        results = trained(zygote, tmp_path / f"killed-{place}", strategy, kill=5 * GATHERS + place)
        for result in results:
            assert (result["steps"], result["world"]) == (STEPS, 2)
            for name, values in undisturbed["trained"].items():
                expected = torch.tensor(values, dtype=torch.float64)
                torch.testing.assert_close(torch.tensor(result["trained"][name], dtype=torch.float64), expected, rtol=1e-9, atol=1e-9)
