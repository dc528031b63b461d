"""Gradients that each replica has unsharded: weighted sums, norms and distribution to parameters,
with one replica and with several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from shoal_worker.engine.step.buffers import CommittedBuffers
from shoal_worker.mesh.gradients import ReplicatedGradients
from shoal_worker.mesh.rank_mesh import alone
from torch import nn

from tests.unit.sharding.rank_threads import run_ranks

SHAPES: Mapping[str, tuple[int, ...]] = {
    "weight": (3, 4),
    "kernel": (2, 3, 2, 2),
    "bias": (5,),
    "scalar": (),
    "unused": (2,),
}


def gradients_of(
    dtype: torch.dtype = torch.float32, *, averages: bool = True
) -> ReplicatedGradients:
    pieces = {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}
    made = ReplicatedGradients(
        pieces,
        counts=lambda name: True,
        buffers=CommittedBuffers(nn.Module()),
        averages=averages,
        device=torch.device("cpu"),
    )
    made.begin()
    return made


def found(
    seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    values = {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
        for name, shape in SHAPES.items()
    }
    return {**values, "unused": None}


def handed_out(gradients: ReplicatedGradients) -> dict[str, torch.Tensor | None]:
    gradients.hand_out(gradients.divisor)
    return {name: piece.grad for name, piece in gradients._pieces.items()}


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("averages", [True, False])
def test_passes_are_weighted_and_their_gradients_are_left_unchanged(
    passes: int, averages: bool
) -> None:
    gradients = gradients_of(averages=averages)
    for _ in range(2):  # the second step must not depend on the first
        gradients.begin()
        left = [found(seed) for seed in range(passes)]
        for weight, one in enumerate(left, start=1):
            gradients.add(weight, one, torch.zeros(0))
        gradients.add(0.0, found(9), torch.zeros(0))
        gradients.sum_over(alone())
        got = handed_out(gradients)
        again = handed_out(gradients)
    assert [[None if g is None else g.tolist() for g in one.values()] for one in left] == [
        [None if g is None else g.tolist() for g in found(seed).values()] for seed in range(passes)
    ]
    for name in SHAPES:
        if name == "unused":
            assert got[name] is None
            continue
        sums = sum(
            one[name] * (weight if averages else 1) for weight, one in enumerate(left, start=1)
        )
        torch.testing.assert_close(got[name], sums / (sum(range(passes + 1)) if averages else 1))
        assert torch.equal(got[name], again[name])
        assert got[name].data_ptr() != again[name].data_ptr()


@pytest.mark.parametrize("scale", [1.0, 1e25, 1e-30, 0.0])
@pytest.mark.parametrize("passes", [1, 2])
def test_norm_is_that_of_the_sums_even_if_squares_exceed_float32(scale: float, passes: int) -> None:
    gradients = gradients_of()
    for seed in range(passes):
        gradients.add(2.0, found(seed, scale), torch.zeros(0))
    gradients.sum_over(alone())
    squares = sum(
        (sum(found(seed, scale)[name].double() * 2.0 for seed in range(passes))).square().sum()
        for name in SHAPES
        if name != "unused"
    )
    assert gradients.squared_norm() == pytest.approx(float(squares), rel=1e-5, abs=0.0)


def test_gradient_that_is_nan_has_a_nan_norm() -> None:
    gradients = gradients_of()
    left = found(0)
    assert left["bias"] is not None
    left["bias"][2] = math.nan
    gradients.add(1.0, left, torch.zeros(0))
    assert math.isnan(gradients.squared_norm())


def test_the_norm_of_a_long_gradient_keeps_its_digits() -> None:
    piece = nn.Parameter(torch.zeros(4096, 1024))
    gradients = ReplicatedGradients(
        {"piece": piece},
        counts=lambda name: True,
        buffers=CommittedBuffers(nn.Module()),
        averages=False,
        device=torch.device("cpu"),
    )
    gradients.add(1.0, {"piece": torch.full_like(piece, 0.1)}, torch.zeros(0))
    assert gradients.squared_norm() == pytest.approx(
        piece.numel() * float(torch.tensor(0.1)) ** 2, rel=1e-5
    )


def test_replicas_sum_their_gradients_with_and_without_several_passes() -> None:
    def train(replicas: Any) -> dict[str, torch.Tensor | None]:
        gradients = gradients_of(torch.float64)
        for seed in range(1 + replicas.rank):
            gradients.add(
                1.0 + replicas.rank,
                found(10 * replicas.rank + seed, dtype=torch.float64),
                torch.zeros(0),
            )
        gradients.sum_over(replicas)
        return handed_out(gradients)

    results = run_ranks(2, train)
    whole = {
        name: (
            found(0, dtype=torch.float64)[name],
            *(found(10 + seed, dtype=torch.float64)[name] for seed in range(2)),
        )
        for name in SHAPES
    }
    for got in results:
        for name, (first, second, third) in whole.items():
            if first is None or second is None or third is None:
                assert got[name] is None
            else:
                torch.testing.assert_close(got[name], (first + 2 * second + 2 * third) / 5)


def test_sparse_gradient_is_added_to_zeros() -> None:
    gradients, left = gradients_of(), found(0)
    assert left["weight"] is not None
    gradients.add(2.0, {**left, "weight": left["weight"].to_sparse()}, torch.zeros(0))
    gradients.sum_over(alone())
    assert gradients.squared_norm() > 0
    torch.testing.assert_close(handed_out(gradients)["weight"], left["weight"])
