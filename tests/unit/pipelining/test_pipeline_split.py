"""The assignment of modules to pipeline stages, tested on plain values."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_common.errors import ConfigurationError
from shoal_worker.pipelining.split import balanced_borders, split_model
from torch import nn


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=8), data=st.data())
def test_stage_boundaries_are_optimal(sizes: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))

    def cost(cuts: tuple[int, ...]) -> tuple[int, int]:
        ends = [0, *cuts, len(sizes)]
        sums = [sum(sizes[a:b]) for a, b in itertools.pairwise(ends)]
        return max(sums), sum(one * one for one in sums)

    borders = balanced_borders(sizes, parts)
    assert borders[0][0] == 0
    assert borders[-1][1] == len(sizes)
    assert all(a < b for a, b in borders)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(borders))
    best = min(cost(cuts) for cuts in itertools.combinations(range(1, len(sizes)), parts - 1))
    assert cost(tuple(start for start, _ in borders[1:])) == best


def test_greedy_filling_would_be_worse() -> None:
    assert balanced_borders([4, 3, 3, 4, 4], 3) == [(0, 2), (2, 4), (4, 5)]


def _mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        nn.Linear(4, 2),
    )


def test_a_split_prints_stages_modules_parameters_and_bytes() -> None:
    with torch.device("meta"):
        model = _mlp()
    assert str(split_model(model, 2)).splitlines() == [
        "stage  modules           parameters       bytes",
        "    0  0.0                       20        80 B",
        "    1  0.1, 1.0, 1.1, 2          30       120 B",
    ]


def test_named_split_points_are_used_and_checked() -> None:
    split = split_model(_mlp(), 3, cut_points=["1.0", "2"])
    assert [stage.modules for stage in split.stages] == [("0.0", "0.1"), ("1.0", "1.1"), ("2",)]
    with pytest.raises(ConfigurationError, match="3 stages need 2 cut points"):
        split_model(_mlp(), 3, cut_points=["2"])
    with pytest.raises(
        ConfigurationError,
        match=r"no block begins at \['nowhere'\]; expected names from 0.1, 1.0, 1.1, 2",
    ):
        split_model(_mlp(), 2, cut_points=["nowhere"])
    with pytest.raises(ConfigurationError, match="in the order in which the blocks run"):
        split_model(_mlp(), 3, cut_points=["2", "1.0"])


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"stages=6: Sequential has 5 blocks \(0.0, 0.1, ... 2\)"
    ):
        split_model(_mlp(), 6)


class _Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.left(x), self.right(x)], 1))


def test_unsplittable_model_gets_one_error_that_names_what_to_provide() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"_Tree has no structure .* nn.Sequential, .* nn.ModuleList, .* pipeline_blocks\(\)",
    ):
        split_model(_Tree(), 2)


class _Offers(nn.Module):
    def __init__(self, *, complete: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.complete = complete

    def pipeline_blocks(self) -> list[nn.Module]:
        return [self.b, self.a] if self.complete else [self.b]


def test_a_model_may_offer_its_blocks() -> None:
    assert [stage.modules for stage in split_model(_Offers(), 2).stages] == [("b",), ("a",)]
    with pytest.raises(
        ConfigurationError, match=r"leaves out the parameters \['a.weight', 'a.bias'\]"
    ):
        split_model(_Offers(complete=False), 1)


def test_tied_weights_are_shared_by_their_stages_and_tied_batch_norms_are_refused() -> None:
    model = _mlp()
    model[1][0].weight = model[0][0].weight
    split = split_model(model, 2, cut_points=["1.0"])
    assert [(one.names, one.stages) for one in split.shared] == [
        (("0.0.weight", "1.0.weight"), (0, 1))
    ]
    assert "shared by stages 0, 1: 0.0.weight = 1.0.weight" in str(split)
    norm = nn.BatchNorm1d(4)
    with pytest.raises(
        ConfigurationError, match="used in several places must be on a single stage"
    ):
        split_model(nn.Sequential(norm, nn.Linear(4, 4), norm), 3)
