"""Sums of squares do not depend on the distribution of the elements."""

from __future__ import annotations

from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st
from shoal_worker.sharding.gradients import from_digits, square_digits

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(values=st.lists(FLOATS, max_size=20), cut=st.integers(0, 20))
def test_sum_is_exact_for_any_split(values: list[float], cut: int) -> None:
    parts = [torch.tensor(part, dtype=torch.float32) for part in (values[:cut], values[cut:])]
    assert from_digits(sum(square_digits(part) for part in parts).tolist()) == float(
        sum(Fraction(v) ** 2 for v in values)
    )
