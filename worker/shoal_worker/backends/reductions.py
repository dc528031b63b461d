"""How the parts that come from all ranks become one, always in rank order: so every backend that reduces here gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

_COMBINATIONS: Final[dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_EXACT: Final = frozenset({"MIN", "MAX", "BAND", "BOR", "BXOR"})
"""They round nothing, so that half precision needs no detour."""


def op_name(op: Any) -> str:
    """The name of torch's `op`, which is a ReduceOp or one of its constants. Raises ValueError for others than those here."""
    name = str(getattr(op, "op", op)).rpartition(".")[2]
    if name not in _COMBINATIONS:
        raise ValueError(f"cannot reduce with {name}: expected one of {', '.join(_COMBINATIONS)}")
    return name


def check_op(op: Any, dtype: torch.dtype) -> None:
    """Raises ValueError when values of `dtype` cannot be reduced with torch's `op`."""
    name = op_name(op)
    if name in ("AVG", "PREMUL_SUM") and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"cannot reduce {dtype} with {name}: expected a floating-point tensor; use SUM and divide")
    if name in ("BAND", "BOR", "BXOR") and (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"cannot reduce {dtype} with {name}: expected integers or booleans")
    if name in ("MIN", "MAX") and dtype.is_complex:
        raise ValueError(f"cannot reduce {dtype} with {name}: complex numbers have no order")


def premultiplier(op: Any) -> float | torch.Tensor:
    """What PREMUL_SUM multiplies each rank's part by."""
    factor: float | torch.Tensor = op.__getstate__()[1]
    return factor


def reduce_parts(parts: Sequence[torch.Tensor], op: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """`parts`, by rank, reduced with torch's `op`, in `out` or a new tensor. Half precision is summed in float32 and rounded once.

    `out` has the parts' dtype and shape, and shares memory with none of them. Raises ValueError for what `check_op` refuses.
    """
    name, dtype = op_name(op), parts[0].dtype
    check_op(op, dtype)
    if name == "PREMUL_SUM":
        factor = premultiplier(op)
        parts = [part * factor for part in parts]
    if out is None:
        out = torch.empty_like(parts[0])
    widened = dtype.itemsize == 2 and dtype.is_floating_point and name not in _EXACT
    sofar = torch.empty_like(out, dtype=torch.float32) if widened else out
    _combine(_COMBINATIONS[name], parts, sofar, widened=widened)
    if name == "AVG":
        sofar.div_(len(parts))
    return out.copy_(sofar) if widened else out


def _combine(combine: Callable[..., torch.Tensor], parts: Sequence[torch.Tensor], sofar: torch.Tensor, *, widened: bool) -> None:
    """Into `sofar`, one rank after the other."""
    if len(parts) == 1 or widened:
        sofar.copy_(parts[0])
        others = parts[1:]
    else:
        combine(parts[0], parts[1], out=sofar)
        others = parts[2:]
    for part in others:
        combine(sofar, part, out=sofar)
