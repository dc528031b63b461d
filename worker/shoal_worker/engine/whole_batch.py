"""`shoal.whole_batch`: in a pass, the rows of all ranks' samples, for losses that compare samples
with each other.

A contrastive loss of a rank's own samples alone is another loss: it has fewer pairs. So each rank
gets everybody's rows and computes the loss of the whole batch. Gradients go back to the rank's own
rows only, divided by its weight in the step, which the sum over the ranks multiplies them by:
summed up, each row's gradient counts once, as in one process. What is used behind the rows (a
temperature) has the whole gradient on every rank, and the weighted sum of these is that gradient
again. Nothing has to be sent in the backward pass.

Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", ICML 2020,
section 2.2 (negatives over all devices).

Used by the training thread; in a backward pass, where a checkpointed block is computed again, by
torch's.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from shoal_common.failpoints import failpoint
from torch.autograd.function import once_differentiable

from shoal_worker.elastic.session import Session
from shoal_worker.elastic.step import Step
from shoal_worker.engine.ranks_in_passes import RanksInPasses
from shoal_worker.torch_internals import uncompiled


class WholeBatch:
    """The ranks of one session, whose rows are put together."""

    def __init__(self, session: Session, *, refusal: str | None) -> None:
        """`refusal`: why this run cannot, and what to do; None: it can."""
        self._session: Session = weakref.proxy(session)  # which this lives as long as
        self._ranks = RanksInPasses(self._session, "the whole batch")
        self._refusal = refusal
        self._step: Callable[[], Step | None] = lambda: None
        """Gives the last step in which rows were put together, while it exists; and what came of so
        many rows of this rank there, first."""
        self._rows, self._total = 1, 1

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `shoal.whole_batch`."""
        rows = _rows(tensors)
        if self._refusal is not None:
            raise ConfigurationError(f"whole_batch: {self._refusal}")
        if self._ranks.in_micro_batches:
            raise ConfigurationError(
                "whole_batch: the loader has micro_batch_size=, and ranks have different numbers "
                "of micro-batches, so they cannot meet in each. Leave out micro_batch_size=; "
                "where memory is short compute the features by torch.utils.checkpoint"
            )
        weight = self._ranks.weight
        whole = (
            self._gathered(tensors, rows if weight > 0 else 0, weight)
            if weight is not None
            else None
        )
        return self._stand_in(tensors, rows) if whole is None else whole

    def _stand_in(self, tensors: Sequence[torch.Tensor], rows: int) -> list[torch.Tensor]:
        """There is no step with others, or it is lost and any values do. As many as before in the
        same step: what the script computes from both must fit together."""
        step = self._session.step
        if step is None or self._step() is not step:
            return list(tensors)
        places = torch.arange(self._total * rows // self._rows) % max(rows, 1)
        return [each[places.to(each.device)] for each in tensors]

    def _gathered(
        self, tensors: Sequence[torch.Tensor], rows: int, weight: float
    ) -> list[torch.Tensor] | None:
        """`rows`: how many of this rank's count; 0: it has a stand-in batch. None: the step is
        lost."""
        header = torch.tensor([rows, _digest(tensors)], dtype=torch.int64)
        headers = self._ranks.gather(header, before=lambda: failpoint("whole_batch.before_headers"))
        if headers is None:
            return None
        counts = headers[:, 0].tolist()
        if headers[:, 1].unique().numel() > 1:
            raise PreconditionError(
                "whole_batch: the ranks gave tensors of different numbers, dtypes, or shapes "
                "beyond the first dimension; this rank gave "
                f"{', '.join(f'{each.dtype} {tuple(each.shape)}' for each in tensors)}",
                reason="RANKS_DIVERGED",
            )
        own = torch.cat([_bytes(each[:rows]) for each in tensors])
        longest = max(counts) * sum(_row_bytes(each) for each in tensors)
        padded = torch.cat([own, own.new_zeros(longest - own.numel())])
        gathered: torch.Tensor | None = padded.new_empty(1, 0)
        if longest:
            gathered = self._ranks.gather(
                padded, before=lambda: failpoint("whole_batch.before_rows")
            )
        if gathered is None:
            return None
        step = self._session.step
        if step is not None and self._step() is not step:
            self._step, self._rows, self._total = (
                weakref.ref(step),
                max(len(tensors[0]), 1),
                sum(counts),
            )
        before = sum(counts[: self._ranks.rank])
        found, begin = [], [0] * len(counts)
        for each in tensors:
            parts = []
            for number, count in enumerate(counts):
                end = begin[number] + count * _row_bytes(each)
                parts.append(
                    gathered[number, begin[number] : end]
                    .clone()
                    .view(each.dtype)
                    .view(count, *each.shape[1:])
                )
                begin[number] = end
            whole = torch.cat(parts) if longest else each[:0].detach()
            takes = each.requires_grad and torch.is_grad_enabled()
            found.append(_WithOwnRows.apply(each, whole, before, rows, weight) if takes else whole)  # type: ignore[no-untyped-call]
        return found


class _WithOwnRows(torch.autograd.Function):
    """The whole; in the backward pass this rank's own rows of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, whole: torch.Tensor, before: int, rows: int, weight: float
    ) -> torch.Tensor:
        ctx.shape, ctx.place, ctx.weight = own.shape, (before, before + rows), weight
        return whole.view_as(whole)

    @staticmethod
    # the other ranks' rows, which it stands for, would be left out of a gradient of the gradient
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        begin, end = ctx.place
        if begin == end:  # a stand-in batch
            return gradient.new_zeros(ctx.shape), None, None, None, None
        return gradient[begin:end] / ctx.weight, None, None, None, None


_known: weakref.WeakKeyDictionary[Session, WholeBatch] = weakref.WeakKeyDictionary()


def prepare(session: Session, refusal: str | None) -> None:
    """The session has a model. `refusal`: see `WholeBatch`."""
    _known[session] = WholeBatch(session, refusal=refusal)


@uncompiled
def whole_batch(session: Session, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """See `shoal.whole_batch`.

    Raises:
        PreconditionError: there is no model yet.
    """
    if session not in _known:
        raise PreconditionError(
            "whole_batch before as_distributed: call it in the loop, on what the model gives"
        )
    return _known[session].of(tensors)


def _rows(tensors: Sequence[torch.Tensor]) -> int:
    """Raises ConfigurationError unless all are plain tensors with the same number of rows."""
    for each in tensors:
        if (
            not isinstance(each, torch.Tensor)
            or each.layout is not torch.strided
            or each.dim() == 0
        ):
            kind = (
                f"{each.layout} {tuple(each.shape)}"
                if isinstance(each, torch.Tensor)
                else type(each).__name__
            )
            raise ConfigurationError(
                f"whole_batch of {kind}: expected dense tensors whose first dimension is this "
                "rank's samples"
            )
    rows = {len(each) for each in tensors}
    if len(rows) != 1:
        raise ConfigurationError(
            f"whole_batch of tensors with {sorted(rows)} rows: expected one or several with the "
            "same number"
        )
    return rows.pop()


def _digest(tensors: Sequence[torch.Tensor]) -> int:
    """What a row is, as a number."""
    said = str([(str(each.dtype), tuple(each.shape[1:])) for each in tensors]).encode()
    return int.from_bytes(hashlib.sha256(said).digest()[:6], "big")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor[:0].element_size() * tensor.shape[1:].numel()
