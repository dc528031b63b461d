"""The bound on the magnitudes of a gradient is never too low. It decides whether the gradient
counts as finite and whether its update is tried first."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from shoal_ps_server.shard.payload import bound_of

ORDINARY = st.floats(-1e3, 1e3, width=32)
EXTREME = st.sampled_from([0.0, 1e-45, -1e-30, 1e15, -1e17, 3e38, -3.4e38])


@given(
    st.lists(st.one_of(ORDINARY, EXTREME), max_size=50),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_magnitudes_never_exceed_the_bound_and_large_ones_are_exact(
    values: list[float], dtype: torch.dtype
) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    largest = float(tensor.abs().max()) if values else 0.0
    bound = bound_of(tensor)
    assert bound >= largest * (1 - 1e-6) or largest < 1e-20  # smaller values have a square of 0
    assert bound == largest if largest > 1e16 else bound <= 1e16


@given(
    st.lists(ORDINARY, min_size=1, max_size=50),
    st.data(),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_one_non_finite_value_is_visible(
    dtype: torch.dtype, values: list[float], data: st.DataObject, culprit: float
) -> None:
    values[data.draw(st.integers(0, len(values) - 1))] = culprit
    assert not math.isfinite(bound_of(torch.tensor(values, dtype=dtype)))
