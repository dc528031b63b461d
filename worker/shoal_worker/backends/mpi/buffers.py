"""Tensors as MPI sees them: bytes with counts for what is moved, typed arrays for what MPI reduces.

Parts that lie side by side in memory, as those of one tensor do, are given to MPI where they are; others by way of a copy. MPI gets tensors
by DLPack: once a tensor was a numpy array, its memory can never be given back by resizing it, which is what zero3 does after each block.
Importing this module starts MPI.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import torch
from mpi4py import MPI
from shoal_common.errors import InvalidRequestError

from shoal_worker.backends.collective import op_name, premultiplier

_TYPES: Final = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
_OPS: Final = {
    "SUM": MPI.SUM,
    "AVG": MPI.SUM,
    "PREMUL_SUM": MPI.SUM,
    "PRODUCT": MPI.PROD,
    "MIN": MPI.MIN,
    "MAX": MPI.MAX,
    "BAND": MPI.BAND,
    "BOR": MPI.BOR,
    "BXOR": MPI.BXOR,
}
_OPS_OF_BOOLEANS: Final = {**_OPS, "SUM": MPI.MAX, "PRODUCT": MPI.MIN}
"""On bytes that are 0 or 1."""


class Packed:
    """`parts` as one run of bytes."""

    def __init__(self, parts: Sequence[torch.Tensor], *, filled: bool) -> None:
        """`filled`: their values count; else they are to be received."""
        if len({part.dtype for part in parts}) > 1:
            raise InvalidRequestError(f"parts of dtypes {[str(part.dtype) for part in parts]}: expected one dtype")
        self._parts = [part.data for part in parts]
        joined = _joined(self._parts)
        self._copied = joined is None
        self._whole = torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype) if joined is None else joined
        if filled and self._copied:
            for index, part in enumerate(self._parts):
                self._run(index).copy_(part.reshape(-1))

    @property
    def buffer(self) -> list[Any]:
        """All of it, as MPI takes it."""
        return [_bytes_of(self._whole), MPI.BYTE]

    @property
    def parts_buffer(self) -> list[Any]:
        """The same with the parts' lengths and positions."""
        counts = [part.nbytes for part in self._parts]
        return [_bytes_of(self._whole), (counts, list(itertools.accumulate(counts, initial=0))[:-1]), MPI.BYTE]

    def set_part(self, index: int, tensor: torch.Tensor) -> None:
        """Fills one part."""
        run = self._run(index)
        if run.data_ptr() != tensor.data_ptr():
            run.copy_(tensor.data.reshape(-1))

    def unpack(self) -> None:
        """Puts what was received into the parts."""
        if self._copied:
            for index, part in enumerate(self._parts):
                part.copy_(self._run(index).view_as(part))

    def _run(self, index: int) -> torch.Tensor:
        start = sum(part.numel() for part in self._parts[:index])
        return self._whole[start : start + self._parts[index].numel()]


class Reduced:
    """A tensor that MPI reduces with torch's `op` over `size` ranks."""

    def __init__(self, tensor: torch.Tensor, op: Any, size: int) -> None:
        if tensor.is_sparse:
            raise InvalidRequestError(
                "backend 'mpi' cannot reduce sparse tensors: make embeddings with sparse=False, or take another strategy than ddp, or gloo"
            )
        self._tensor, self._size = tensor.data, size
        self._name = op_name(op)
        values = self._tensor.contiguous()
        if values.dtype in (torch.float16, torch.bfloat16):
            values = values.float()
        if self._name == "PREMUL_SUM":
            values = values * premultiplier(op)
        self._values = values
        booleans = values.dtype == torch.bool
        self.op = (_OPS_OF_BOOLEANS if booleans else _OPS)[self._name]
        """MPI's."""
        self.buffer = [_bytes_of(values), MPI.UINT8_T] if booleans else [values.view(-1), _type_of(values)]

    def finish(self) -> None:
        """Puts the result into the tensor."""
        if self._name == "AVG":
            self._values.div_(self._size)
        if self._values is not self._tensor:
            self._tensor.copy_(self._values)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One flat tensor that the parts make up in this order; None if they do not."""
    some = [part for part in parts if part.numel()]
    if not some:
        return parts[0].new_empty(0)
    expected = some[0].data_ptr()
    for part in some:
        if (
            not part.is_contiguous()
            or part.data_ptr() != expected
            or part.untyped_storage().data_ptr() != some[0].untyped_storage().data_ptr()
        ):
            return None
        expected += part.nbytes
    return some[0].as_strided((sum(part.numel() for part in some),), (1,))


def _bytes_of(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(-1).view(torch.uint8)


def _type_of(tensor: torch.Tensor) -> Any:
    try:
        return _TYPES[tensor.dtype]
    except KeyError:
        raise InvalidRequestError(f"backend 'mpi' cannot reduce {tensor.dtype}") from None
