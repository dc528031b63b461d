"""Exchanges between ranks within a forward or backward pass (SyncBatchNorm, and losses over the
full batch), under faults. If a rank dies during an exchange, the step is redone and the result is
the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote

STEPS = 18


class Asking(NamedTuple):
    """A script with exchanges, and the places where a rank is killed."""

    script: str
    places: tuple[tuple[str, int], ...]
    """Failpoints, with the hit at which each kills the rank."""


NORMS = Asking(
    "normalizes.py", (("norms.before_gather", 5 * 4 + 1), ("norms.before_gather", 5 * 4 + 4))
)
"""Each step gathers in the forward and backward passes of two layers. The failpoints are the first
and the last of these gathers in the sixth step."""
LOSS = Asking(
    "contrasts.py",
    (
        ("whole_batch.before_headers", 5 * 2 + 1),
        ("whole_batch.before_rows", 5 * 2 + 1),
        ("whole_batch.before_rows", 5 * 2 + 2),
    ),
)
"""Each step gathers two tensors. In the last case the script has the first tensor's rows when the
gather of the second one fails."""


def trained(
    zygote: Zygote,
    directory: Path,
    asking: Asking,
    strategy: str,
    *,
    kill: tuple[str, int] | None = None,
) -> list[dict[str, Any]]:
    directory.mkdir()
    with cluster(zygote, directory, script=Path(__file__).with_name(asking.script)) as running:
        failpoints = {} if kill is None else {"SHOAL_FAILPOINTS": f"{kill[0]}@{kill[1]}=kill"}
        running.start(0, STRATEGY=strategy)
        running.start(1, STRATEGY=strategy, **failpoints)
        running.start(2, STRATEGY=strategy)
        results: list[dict[str, Any]] = running.finish(*((0, 1, 2) if kill is None else (0, 2)))
    return results


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("asking", [NORMS, LOSS], ids=["norms", "loss"])
def test_rank_killed_in_a_pass_leaves_the_others_with_the_same_model(
    zygote: Zygote, tmp_path: Path, asking: Asking, strategy: str
) -> None:
    undisturbed = trained(zygote, tmp_path / "undisturbed", asking, strategy)[0]
    assert all(torch.tensor(values).isfinite().all() for values in undisturbed["trained"].values())
    for number, place in enumerate(asking.places):
        results = trained(zygote, tmp_path / f"killed-{number}", asking, strategy, kill=place)
        for result in results:
            assert (result["steps"], result["world"]) == (STEPS, 2)
            for name, values in undisturbed["trained"].items():
                expected = torch.tensor(values, dtype=torch.float64)
                torch.testing.assert_close(
                    torch.tensor(result["trained"][name], dtype=torch.float64),
                    expected,
                    rtol=1e-9,
                    atol=1e-9,
                )
