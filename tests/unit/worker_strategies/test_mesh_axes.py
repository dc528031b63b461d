"""Default sizes of the mesh axes when the user of tensor or pipeline sets none."""

from __future__ import annotations

from typing import Any

import pytest
import shoal
import torch
from shoal_worker.mesh.layouts import Axes

from tests.unit.worker_strategies import mesh_models as models


@pytest.mark.parametrize(
    ("strategy", "axis", "sizes"),
    [
        ("tensor", "tensor", [1, 2, 2, 4, 4, 4, 4, 4, 4]),  # the model has four attention heads
        ("pipeline", "pipeline", [1, 2, 3, 4, 4, 4, 4, 4, 4]),  # the model has four blocks
    ],
)
def test_additional_ranks_never_enlarge_a_ranks_part_and_surplus_ones_are_spares(
    strategy: str, axis: str, sizes: list[int]
) -> None:
    def rank() -> list[Axes]:
        net = models.make()
        model: Any = shoal.as_distributed(
            net,
            torch.optim.AdamW(net.parameters()),
            strategy=strategy,
            minimum_parameter_group_size=64,
        )[0]
        return [model.engine.layouts.axes(world) for world in range(1, 10)]

    (divisions,) = shoal.launch(rank, world_size=1)
    assert [getattr(axes, axis) for axes in divisions] == sizes
    assert [axes.replica_size for axes in divisions] == sizes
    assert [axes.data for axes in divisions] == [
        world // size for world, size in enumerate(sizes, start=1)
    ]
