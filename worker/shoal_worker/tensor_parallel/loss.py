"""Cross-entropy over logits that are split along the vocabulary. No rank ever has the full logits.

Two all-reduces of one or two numbers per token, in the forward pass only, replace an all-gather of
`vocabulary` numbers per token. This is the method of Megatron-LM (Shoeybi et al. 2019, section 3),
extended to support torch's weight, ignore_index, reduction and label_smoothing.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor

from shoal_worker.tensor_parallel.context import local_offset, split_dimension


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose backward pass returns the gradient unchanged: every rank uses the sum in the
    same way, so each rank already has the full gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Any) -> Any:
        return gradients[0], None


def vocabulary_parallel_cross_entropy(
    logits: DTensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Computes F.cross_entropy(logits, target, ...). Returns the same plain tensor on every rank.

    Args:
        logits: logits split by class, along dimension 1, or 0 if it is the only dimension.
        target: class indices, the same on every rank, with the shape of the logits without the
            class dimension.
        weight: weight of each class; the full tensor on every rank.

    Raises:
        ConfigurationError: the targets are probabilities, the reduction is unknown, or a target is
            outside the vocabulary. On a GPU, checking the targets would require a synchronization,
            so a target outside the vocabulary makes the loss NaN instead.
    """
    _check(target, logits, ignore_index, reduction)
    dimension = cast(int, split_dimension(logits))
    group = logits.device_mesh.get_group()
    classes = logits.shape[dimension]
    local = logits.to_local().movedim(dimension, -1)
    computed = local.float() if local.dtype in (torch.float16, torch.bfloat16) else local
    largest = computed.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shifted = computed - largest.unsqueeze(-1)

    index = target - local_offset(logits, dimension)
    elsewhere = (index < 0) | (index >= shifted.shape[-1]) | (target == ignore_index)
    own = (
        shifted.gather(-1, index.masked_fill(elsewhere, 0).unsqueeze(-1))
        .squeeze(-1)
        .masked_fill(elsewhere, 0)
    )
    sums = [shifted.exp().sum(-1), own]
    class_weights = None if weight is None else weight.to(shifted.dtype)
    if label_smoothing:
        begin = local_offset(logits, dimension)
        part = (
            shifted
            if class_weights is None
            else shifted * class_weights[begin : begin + shifted.shape[-1]]
        )
        sums.append(part.sum(-1))
    # torch's method is untyped
    summed: torch.Tensor = _SumOverRanks.apply(torch.stack(sums), group)  # type: ignore[no-untyped-call]
    exp_sum, picked, *smoothed = summed.unbind(0)

    log_normalizer = exp_sum.log()
    kept = target != ignore_index
    safe = target.masked_fill(~kept, 0)
    weights = kept.to(shifted.dtype) if class_weights is None else class_weights[safe] * kept
    loss = (log_normalizer - picked) * weights
    if smoothed:
        total_weight = classes if class_weights is None else class_weights.sum()
        uniform = (log_normalizer * total_weight - smoothed[0]) * kept
        loss = (1 - label_smoothing) * loss + label_smoothing / classes * uniform
    if target.device.type != "cpu":  # on other devices, _check does not check the targets
        loss = loss.masked_fill(_outside(target, classes, ignore_index), torch.nan)
    if reduction == "sum":
        loss = loss.sum()
    elif reduction == "mean":
        loss = loss.sum() / weights.sum()
    return loss.to(local.dtype)


def _check(target: torch.Tensor, logits: DTensor, ignore_index: int, reduction: str) -> None:
    expected = logits.shape[:1] + logits.shape[2:] if logits.ndim > 1 else torch.Size([])
    if target.is_floating_point() or target.shape != expected:
        raise ConfigurationError(
            f"cross_entropy over split logits of shape {tuple(logits.shape)}: the target is "
            f"{target.dtype} of shape {tuple(target.shape)}; expected class indices of shape "
            f"{tuple(expected)}. For targets that are probabilities, leave loss_parallel out, so "
            "that the logits are not split"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ConfigurationError(
            f'cross_entropy: reduction={reduction!r}; expected "mean", "sum" or "none"'
        )
    classes = logits.shape[min(1, logits.ndim - 1)]
    # on a GPU, this check would require a synchronization
    wrong = _outside(target, classes, ignore_index) if target.device.type == "cpu" else None
    if wrong is not None and bool(wrong.any()):
        raise ConfigurationError(
            f"cross_entropy: target {int(target[wrong][0])} is not one of the {classes} classes "
            "or ignore_index"
        )


def _outside(target: torch.Tensor, classes: int, ignore_index: int) -> torch.Tensor:
    return ((target < 0) | (target >= classes)) & (target != ignore_index)
