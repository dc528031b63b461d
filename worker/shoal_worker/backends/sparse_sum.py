"""The sum of a sparse tensor over all ranks, made of all-gathers.

Ranks have different numbers of entries. They first exchange these numbers, so they wait for each
other when the sum is issued. Then one all-gather sends the indices and values of all ranks, padded
to the largest number of entries. Every rank adds up all entries in the order of ranks.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import torch
import torch.distributed as dist
from shoal_common.errors import InvalidRequestError

from shoal_worker.backends.collective import op_name
from shoal_worker.backends.python_group import ForwardingGroup
from shoal_worker.torch_internals import AllgatherOptions

_ALIGNMENT: Final = 16
"""Size of the largest element (complex128) in bytes. All parts start at a multiple of it, so that
their bytes can be viewed as elements of any dtype."""


class SparseSum:
    """The sum of `tensor` over the ranks of a group, which gathers `packed` into `gathered` and
    then calls `write`."""

    def __init__(self, group: ForwardingGroup, tensor: torch.Tensor, opts: Any) -> None:
        """Exchanges the numbers of entries, and packs this rank's entries. `opts`: options of the
        all-reduce; None: its defaults.

        Raises:
            InvalidRequestError: the operation is not SUM, or the tensors of two ranks differ in
                shape, dtype or number of sparse dimensions.
            GroupEndedError: the group has ended.
        """
        op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        if op != dist.ReduceOp.SUM:
            raise InvalidRequestError(
                f"allreduce of a sparse tensor with {op_name(op)}: expected SUM"
            )
        own = tensor.detach().coalesce()
        self._tensor = tensor
        self._index_shape = (tensor.sparse_dim(),)
        self._value_shape = tuple(own.values().shape[1:])
        indices, values = _bytes(own.indices().T), _bytes(own.values())
        self._counts = _exchange_counts(group, own)
        longest = max(self._counts)
        self._values_at = _aligned(8 * longest * tensor.sparse_dim())
        size = self._values_at + _aligned(
            longest * own.dtype.itemsize * own.values().shape[1:].numel()
        )
        self.packed: Final = indices.new_zeros(max(size, _ALIGNMENT))
        """The bytes of this rank's indices and values; equally many on all ranks."""
        self.packed[: len(indices)] = indices
        self.packed[self._values_at : self._values_at + len(values)] = values
        self.gathered: Final = indices.new_empty(group.size() * len(self.packed))
        """The bytes of all ranks, in the order of ranks."""

    def write(self) -> list[torch.Tensor]:
        """Writes the sum of all ranks' entries to the tensor. Returns it as a list."""
        indices, values = [], []
        for count, row in zip(self._counts, self.gathered.view(len(self._counts), -1), strict=True):
            indices.append(_elements(row, count, torch.int64, self._index_shape))
            values.append(
                _elements(row[self._values_at :], count, self._tensor.dtype, self._value_shape)
            )
        total = torch.sparse_coo_tensor(
            torch.cat(indices).T, torch.cat(values), self._tensor.shape, check_invariants=False
        )
        with torch.no_grad():
            self._tensor.copy_(total.coalesce())
        return [self._tensor]


def _exchange_counts(group: ForwardingGroup, own: torch.Tensor) -> list[int]:
    """Returns each rank's number of entries. `own`: this rank's tensor, coalesced."""
    form = f"{list(own.shape)}, {own.dtype}, {own.sparse_dim()} sparse dimensions"
    mine = torch.tensor(
        [own.values().shape[0], zlib.crc32(form.encode())], dtype=torch.int64, device=own.device
    )
    everyones = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([everyones], [mine], AllgatherOptions()).wait()
    counts, forms = torch.stack(everyones).T.tolist()
    other = next((rank for rank, each in enumerate(forms) if each != forms[0]), None)
    if other is not None:
        raise InvalidRequestError(
            f"allreduce of a sparse tensor: those of ranks 0 and {other} differ in shape, dtype or "
            f"number of sparse dimensions; rank {group.rank()} has {form}; expected the same on "
            "all ranks"
        )
    return [int(count) for count in counts]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _elements(
    row: torch.Tensor, count: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Returns the first `count` elements of a row of bytes. `shape`: shape of one element."""
    size = count * dtype.itemsize * torch.Size(shape).numel()
    return row[:size].view(dtype).view(count, *shape)
