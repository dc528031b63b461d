"""How the parts that a rank received from all ranks become one: the local half of a reduce-scatter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def reduction(op: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Reduces the first dimension of a tensor, the rank it came from, with torch's `op`. Raises ValueError for others than those here."""
    pairwise: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        dist.ReduceOp.PRODUCT: torch.mul,
        dist.ReduceOp.BAND: torch.bitwise_and,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BXOR: torch.bitwise_xor,
    }
    if op == dist.ReduceOp.SUM:
        return lambda parts: parts.sum(0, dtype=parts.dtype)
    if op == dist.ReduceOp.AVG:
        return lambda parts: parts.mean(0)
    if op == dist.ReduceOp.MIN:
        return lambda parts: parts.amin(0)
    if op == dist.ReduceOp.MAX:
        return lambda parts: parts.amax(0)
    for known, combine in pairwise.items():
        if op == known:
            return lambda parts: functools.reduce(combine, parts.unbind(0))
    raise ValueError(f"reduce_scatter cannot reduce with {op}: expected SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR")
