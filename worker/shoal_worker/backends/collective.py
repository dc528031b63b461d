"""Represents each rank's call to a collective as data, checks that the calls of all ranks match,
and executes the collective.

All of torch's variants of a collective (lists, single tensors, coalesced) are represented as lists
of tensors, called parts, which are usually views of the caller's tensors. This module does not
communicate: `execute` needs the parts of all ranks in one address space.

Reductions always add in rank order, so every backend that reduces here produces the same bits.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from shoal_common.errors import InvalidRequestError
from torch.distributed import DistBackendError

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
"""Reductions that do not round, so that half precision needs no wider dtype."""


def op_name(op: Any) -> str:
    """Returns the name of torch's `op`, a ReduceOp or one of its constants. Raises ValueError for
    an unsupported op."""
    name = str(getattr(op, "op", op)).rpartition(".")[2]
    if name not in _COMBINATIONS:
        raise ValueError(f"cannot reduce with {name}: expected one of {', '.join(_COMBINATIONS)}")
    return name


def check_op(op: Any, dtype: torch.dtype) -> None:
    """Raises ValueError if values of `dtype` cannot be reduced with torch's `op`."""
    name = op_name(op)
    if name in ("AVG", "PREMUL_SUM") and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(
            f"cannot reduce {dtype} with {name}: expected a floating-point tensor; use SUM and "
            "divide the result"
        )
    if name in ("BAND", "BOR", "BXOR") and (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"cannot reduce {dtype} with {name}: expected integers or booleans")
    if name in ("MIN", "MAX") and dtype.is_complex:
        raise ValueError(
            f"cannot reduce {dtype} with {name}, because complex numbers have no "
            "order; use SUM or AVG"
        )


def premultiplier(op: Any) -> float | torch.Tensor:
    """Returns the factor of PREMUL_SUM, by which each rank's tensor is multiplied before the
    sum."""
    factor: float | torch.Tensor = op.__getstate__()[1]
    return factor


def reduce_parts(
    parts: Sequence[torch.Tensor], op: Any, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Reduces the ranks' tensors `parts`, given in rank order, with torch's `op`. Writes the result
    into `out` or a new tensor.

    Half precision is summed in float32 and rounded once. `out` has the dtype and shape of the
    parts, and shares memory with none of them. Raises the ValueError of `check_op`.
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


def _combine(
    combine: Callable[..., torch.Tensor],
    parts: Sequence[torch.Tensor],
    sofar: torch.Tensor,
    *,
    widened: bool,
) -> None:
    """Reduces the parts into the tensor `sofar`, in rank order. `widened`: True if half precision
    must be converted to `sofar`'s wider dtype."""
    if len(parts) == 1 or widened:
        sofar.copy_(parts[0])
        others = parts[1:]
    else:
        combine(parts[0], parts[1], out=sofar)
        others = parts[2:]
    for part in others:
        combine(sofar, part, out=sofar)


class UnmatchedCollectiveError(InvalidRequestError, DistBackendError):
    """Raised if ranks of one group have issued mismatched collectives: they differ in kind, op,
    root, dtype, size or order."""

    default_reason = "COLLECTIVES_UNMATCHED"


class Kind(enum.Enum):
    """Kind of collective, which determines the layout of `Collective.inputs` and
    `Collective.outputs`. The descriptions below are for k tensors and w ranks."""

    ALL_REDUCE = "all_reduce"
    """k tensors, reduced in place: the inputs are the outputs."""
    BROADCAST = "broadcast"
    """k tensors, written in place."""
    REDUCE = "reduce"
    """k tensors, reduced in place on the root."""
    ALL_GATHER = "all_gather"
    """k inputs and k times w outputs: the results for the first input in rank order, then for the
    second."""
    REDUCE_SCATTER = "reduce_scatter"
    """k times w inputs, ordered like the outputs of ALL_GATHER, and k outputs."""
    GATHER = "gather"
    """One input; w outputs on the root, and none on other ranks."""
    SCATTER = "scatter"
    """w inputs on the root, and none on other ranks; one output."""
    ALL_TO_ALL = "all_to_all"
    """w inputs and w outputs."""
    BARRIER = "barrier"
    """No inputs and no outputs."""


_LIKE_EVERYWHERE: Final = (Kind.ALL_REDUCE, Kind.BROADCAST, Kind.REDUCE, Kind.REDUCE_SCATTER)
"""Kinds whose inputs have the same sizes on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One rank's call to a collective: its kind, reduction, inputs and outputs."""

    kind: Kind
    inputs: Sequence[torch.Tensor] = ()
    outputs: Sequence[torch.Tensor] = ()
    op: Any = None
    """torch's ReduceOp; None if the collective is not a reduction."""
    root: int | None = None
    result: list[Any] = field(default_factory=list)
    """Value of the work's future: the output tensors, structured as the caller passed them."""

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Dtypes of all inputs and outputs."""
        return frozenset(one.dtype for one in (*self.inputs, *self.outputs))

    def check(self) -> None:
        """Checks that the inputs can be reduced, and that the outputs have the same dtype as the
        inputs. Otherwise raises ValueError or InvalidRequestError."""
        for one in self.inputs if self.op is not None else ():
            check_op(self.op, one.dtype)
        if (
            len(self.dtypes) > 1
            and len({one.dtype for one in self.inputs}) == 1
            and self.inputs is not self.outputs
        ):
            raise InvalidRequestError(f"{self}: the outputs differ in dtype from the inputs")

    def matches(self, other: Collective) -> bool:
        """Returns whether `other`, another rank's call, can belong to the same collective as this
        call."""
        return self.signature == other.signature

    @property
    def signature(self) -> tuple[Any, ...]:
        """Properties of the call that must be the same on all ranks."""
        sizes = tuple(one.numel() for one in self.inputs) if self.kind in _LIKE_EVERYWHERE else ()
        return (
            self.kind,
            None if self.op is None else op_name(self.op),
            self.root,
            self.dtypes,
            sizes,
        )

    def __str__(self) -> str:
        details = [] if self.op is None else [op_name(self.op)]
        details += [] if self.root is None else [f"root {self.root}"]
        details += [_described(one) for one in (self.inputs or self.outputs)[:3]]
        if len(self.inputs or self.outputs) > 3:
            details.append("...")
        return f"{self.kind.value}({', '.join(details)})"


def execute(calls: Sequence[Collective]) -> None:
    """Runs a collective on behalf of all ranks: computes and writes every rank's outputs.

    `calls`: the ranks' calls, in rank order; all must have the same signature.

    Raises UnmatchedCollectiveError if a rank sends a part of a different size than its receiver
    expects, and ValueError if the op cannot reduce the values.
    """
    with torch.no_grad():
        _EXECUTIONS[calls[0].kind](calls)


def _reduced(calls: Sequence[Collective], index: int) -> torch.Tensor:
    return reduce_parts([call.inputs[index].data for call in calls], calls[0].op)


def _all_reduce(calls: Sequence[Collective]) -> None:
    for index in range(len(calls[0].inputs)):
        reduced = _reduced(calls, index)
        for call in calls:
            _copy(call.outputs[index], reduced)


def _reduce(calls: Sequence[Collective]) -> None:
    assert calls[0].root is not None
    for index, output in enumerate(calls[calls[0].root].outputs):
        _copy(output, _reduced(calls, index))


def _broadcast(calls: Sequence[Collective]) -> None:
    root = calls[0].root
    assert root is not None
    for rank, call in enumerate(calls):
        if rank != root:
            for output, given in zip(call.outputs, calls[root].inputs, strict=True):
                _copy(output, given)


def _all_gather(calls: Sequence[Collective]) -> None:
    for index in range(len(calls[0].inputs)):
        for receiver, call in enumerate(calls):
            for sender, sending in enumerate(calls):
                output = call.outputs[index * len(calls) + sender]
                _transfer(output, sending.inputs[index], sender, receiver, call)


def _reduce_scatter(calls: Sequence[Collective]) -> None:
    for index in range(len(calls[0].outputs)):
        # Compute all results before writing any: an output may overlap its rank's input.
        reduced = [_reduced(calls, index * len(calls) + rank) for rank in range(len(calls))]
        for call, part in zip(calls, reduced, strict=True):
            _copy(call.outputs[index], part)


def _gather(calls: Sequence[Collective]) -> None:
    root = calls[0].root
    assert root is not None
    for sender, (output, sending) in enumerate(zip(calls[root].outputs, calls, strict=True)):
        _transfer(output, sending.inputs[0], sender, root, sending)


def _scatter(calls: Sequence[Collective]) -> None:
    root = calls[0].root
    assert root is not None
    for receiver, (given, call) in enumerate(zip(calls[root].inputs, calls, strict=True)):
        _transfer(call.outputs[0], given, root, receiver, call)


def _all_to_all(calls: Sequence[Collective]) -> None:
    for receiver, call in enumerate(calls):
        for sender, sending in enumerate(calls):
            _transfer(call.outputs[sender], sending.inputs[receiver], sender, receiver, call)


_EXECUTIONS: Final[dict[Kind, Callable[[Sequence[Collective]], None]]] = {
    Kind.ALL_REDUCE: _all_reduce,
    Kind.BROADCAST: _broadcast,
    Kind.REDUCE: _reduce,
    Kind.ALL_GATHER: _all_gather,
    Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.GATHER: _gather,
    Kind.SCATTER: _scatter,
    Kind.ALL_TO_ALL: _all_to_all,
    Kind.BARRIER: lambda calls: None,
}


def _transfer(
    output: torch.Tensor, given: torch.Tensor, sender: int, receiver: int, call: Collective
) -> None:
    if output.numel() != given.numel():
        raise UnmatchedCollectiveError(
            f"{call.kind.value}: rank {receiver} expects {_described(output)} from rank {sender}, "
            f"which sends {_described(given)}"
        )
    _copy(output, given)


def _copy(output: torch.Tensor, given: torch.Tensor) -> None:
    if output.is_sparse:
        # a sparse tensor's .data is a different tensor, which gets separate rows when it is written
        # to
        output.copy_(given)
        return
    # Through .data, as other backends write: this leaves autograd's version counters unchanged.
    output.data.copy_(given.data.view_as(output) if given.shape != output.shape else given.data)


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
