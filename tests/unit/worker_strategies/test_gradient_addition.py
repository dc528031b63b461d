"""Gradients of several micro-batches are added in one operation. The sum is bitwise equal to that
of successive additions."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from shoal_worker.replicated import buckets
from shoal_worker.replicated.buckets import add_times


def _given(dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [
        torch.randn(shape, generator=draw).to(dtype)
        for shape in ((3,), (5, 7), (), (0, 4), (1000,))
    ]


@pytest.mark.parametrize("at_once", [1, 1 << 20])
@pytest.mark.parametrize("factor", [1.0, 3.0, 1 / 3])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float64, torch.float32),
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
)
def test_result_does_not_depend_on_how_much_is_added_at_once(
    dtypes: tuple[torch.dtype, torch.dtype], factor: float, at_once: int
) -> None:
    wide, narrow = dtypes
    expected = [torch.ones(each.shape, dtype=wide) for each in _given(narrow)]
    totals = [each.clone() for each in expected]
    for total, each in zip(expected, _given(narrow), strict=True):
        total.add_(each.to(wide), alpha=factor)
    with mock.patch.object(buckets, "_CONVERTED_BYTES", at_once):
        add_times(list(zip(totals, _given(narrow), strict=True)), factor)
    assert all(torch.equal(total, one) for total, one in zip(totals, expected, strict=True))


def test_sparse_gradients_are_added_too() -> None:
    total, dense = torch.ones(4, 2), torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [0.5, 0.0]])
    add_times([(total, dense.to_sparse(1))], 2.0)
    assert torch.equal(total, 1 + 2 * dense)
