"""The arithmetic of reductions and the reuse of their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_worker.backends.collective import op_name, reduce_parts
from shoal_worker.scratch import ScratchMemory

CPU = torch.device("cpu")
_INTEGERS = [torch.tensor([3, 5]), torch.tensor([6, 1]), torch.tensor([2, 7])]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, [11, 13]),
        (dist.ReduceOp.PRODUCT, [36, 35]),
        (dist.ReduceOp.MIN, [2, 1]),
        (dist.ReduceOp.MAX, [6, 7]),
        (dist.ReduceOp.BAND, [2, 1]),
        (dist.ReduceOp.BOR, [7, 7]),
        (dist.ReduceOp.BXOR, [7, 3]),
    ],
)
def test_integers_are_reduced_by_every_op(op: Any, expected: list[int]) -> None:
    assert reduce_parts(_INTEGERS, op).tolist() == expected
    assert reduce_parts(_INTEGERS, dist.ReduceOp(op)).tolist() == expected
    assert [part.tolist() for part in _INTEGERS] == [[3, 5], [6, 1], [2, 7]]


def test_means_and_premultiplied_sums_are_reduced() -> None:
    parts = [part.double() for part in _INTEGERS]
    assert reduce_parts(parts, dist.ReduceOp.AVG).tolist() == [11 / 3, 13 / 3]
    assert reduce_parts(parts, dist._make_nccl_premul_sum(0.5)).tolist() == [5.5, 6.5]
    assert reduce_parts(parts[:1], dist.ReduceOp.SUM).tolist() == [3, 5]


def test_sums_are_in_rank_order() -> None:
    parts = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0)]
    assert reduce_parts(parts, dist.ReduceOp.SUM).item() == 1.0  # ((1e8 + 1) - 1e8) + 1 in float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG])
def test_half_precision_is_summed_in_float32_and_rounded_once(dtype: torch.dtype, op: Any) -> None:
    values = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = values.float().sum(0)
    expected = (exact / 5 if op == dist.ReduceOp.AVG else exact).to(dtype)
    out = torch.empty(1000, dtype=dtype)
    assert reduce_parts(values.unbind(0), op, out) is out
    torch.testing.assert_close(out, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert (out == expected).float().mean() > 0.99  # float32's own rounding may change ties


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (dist.ReduceOp.AVG, torch.int64),
        (dist._make_nccl_premul_sum(2.0), torch.int32),
        (dist.ReduceOp.BAND, torch.float32),
        (dist.ReduceOp.MAX, torch.complex64),
    ],
)
def test_values_that_cannot_be_reduced_are_refused(op: Any, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"cannot reduce {dtype} with {op_name(op)}"):
        reduce_parts([torch.ones(2, dtype=dtype)] * 2, op)


def test_scratch_memory_is_reused_exclusively() -> None:
    scratch = ScratchMemory()
    first, second = (scratch.take((3, 4), torch.float32, CPU) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    scratch.give_back(first)
    again = scratch.take((2, 3), torch.float64, CPU)
    assert again.data_ptr() == first.data_ptr()
    assert (again.shape, again.dtype) == ((2, 3), torch.float64)


def test_scratch_keeps_the_two_largest() -> None:
    scratch = ScratchMemory(most=2)
    taken = [scratch.take((size,), torch.float32, CPU) for size in (10, 30, 20)]
    for one in taken:
        scratch.give_back(one)
    kept = {scratch.take((15,), torch.float32, CPU).data_ptr() for _ in range(2)}
    assert kept == {taken[1].data_ptr(), taken[2].data_ptr()}
