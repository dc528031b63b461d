"""nn.MultiheadAttention with heads that are split across ranks. Its forward method has the same
arguments and results as torch's.

The packed `in_proj_weight` (3E x E) is stored as 3 x E x E and split along the second dimension.
Each rank thus has its own heads' rows for query, key and value. Shapes: B batch, L queries, S keys,
E features, H heads.
"""

# ruff: noqa: N803, N806 - shapes as suffixes

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shoal_worker.tensor_parallel.attention import LocalSlice, attend, scaled_dot_product_attention
from shoal_worker.tensor_parallel.context import (
    DropoutRandomness,
    ParallelContext,
    grad_partial,
    local_offset,
    whole,
)
from shoal_worker.tensor_parallel.region import RegionMode, region
from shoal_worker.torch_internals import uncompiled


class MultiheadForward(nn.Module):
    """Mixin for nn.MultiheadAttention that computes this rank's heads."""

    _shoal_context: ParallelContext

    @uncompiled
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        with region(self._shoal_context, leaf=True) as mode:
            return _forward(
                self,
                mode,
                query,
                key,
                value,
                key_padding_mask,
                need_weights,
                attn_mask,
                average_attn_weights,
                is_causal,
            )


def _forward(
    module: nn.Module,
    mode: RegionMode,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    need_weights: bool,
    attn_mask: torch.Tensor | None,
    average_attn_weights: bool,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    assert isinstance(module, nn.MultiheadAttention)
    context = mode.context
    batched = query.ndim == 3
    query_BHLD, key_BHSD, value_BHSD = (
        context.sharded(_heads(module, grad_partial(mode.enter(tensor)), weight, bias, batched), 1)
        for tensor, (weight, bias) in zip((query, key, value), _projections(module), strict=True)
    )
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = (
        None
        if causal
        else _mask(module, attn_mask, key_padding_mask, is_causal, query_BHLD, key_BHSD, batched)
    )
    dropout_p = module.dropout if module.training else 0.0
    if need_weights:
        cut = LocalSlice(
            dimension=1,
            start=local_offset(query_BHLD, 1),
            shape=(*query_BHLD.shape[:-1], key_BHSD.shape[-2]),
        )
        locals_ = [t.to_local() for t in (query_BHLD, key_BHSD, value_BHSD)]
        local_mask = (
            mask
            if mask is None or mask.shape[1] == 1
            else mask.narrow(1, cut.start, locals_[0].shape[1])
        )
        output, weights = attend(
            context, locals_[0], locals_[1], locals_[2], local_mask, cut, dropout_p=dropout_p
        )
        attended = context.sharded(output, 1)
    else:
        turned = None if mask is None else mode.enter(mask)
        attended = scaled_dot_product_attention(
            context, query_BHLD, key_BHSD, value_BHSD, turned, dropout_p, causal
        )
        weights = None
    merged = attended.transpose(1, 2).flatten(2)
    if not batched:
        merged = merged.squeeze(0)
    elif not module.batch_first:
        merged = merged.transpose(0, 1)
    output = module.out_proj(merged)
    if (
        batched
        and module.batch_first
        and module.training
        and context.dropout is DropoutRandomness.AS_ONE_PROCESS
    ):
        # Use torch's memory layout, because a subsequent dropout layer draws its random numbers in
        # memory order.
        output = output.transpose(0, 1).contiguous().transpose(0, 1)
    return output, None if weights is None else _weights(
        context, weights, average_attn_weights, batched
    )


def _projections(module: nn.MultiheadAttention) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Returns this rank's rows of the weight and the bias, for each of query, key and value."""
    if module._qkv_same_embed_dim:
        weights: tuple[torch.Tensor, ...] = _local(module.in_proj_weight).unbind(0)
    else:
        weights = tuple(
            _local(w) for w in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        )
    biases = (None,) * 3 if module.in_proj_bias is None else _local(module.in_proj_bias).unbind(0)
    return list(zip(weights, biases, strict=True))


def _local(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def _heads(
    module: nn.MultiheadAttention,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    batched: bool,
) -> torch.Tensor:
    """Returns the projection of `input` as B x own heads x length x head size, regardless of the
    layout of the input."""
    projected = F.linear(input, weight, bias)
    if not batched:
        projected = projected.unsqueeze(0)
    elif not module.batch_first:
        projected = projected.transpose(0, 1)
    heads: torch.Tensor = projected.unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
    return heads


def _mask(
    module: nn.MultiheadAttention,
    attn_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    is_causal: bool,
    query_BHLD: DTensor,
    key_BHSD: DTensor,
    batched: bool,
) -> torch.Tensor | None:
    """Combines both masks into one plain tensor of shape (B or 1) x (H or 1) x L x S, which is
    added to the attention scores."""
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # torch's message
    batch, heads, length, _ = query_BHLD.shape
    keys = key_BHSD.shape[-2]
    masks: list[torch.Tensor] = []
    for mask in (attn_mask, key_padding_mask):
        if mask is None:
            continue
        mask = whole(mask) if isinstance(mask, DTensor) else mask
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query_BHLD.dtype).masked_fill_(mask, float("-inf"))
        if len(masks) == 0 and mask is not None and attn_mask is not None:
            mask = (
                mask.view(1, 1, length, keys)
                if mask.ndim == 2
                else mask.view(batch, heads, length, keys)
            )
        else:
            mask = mask.view(batch if batched else 1, 1, 1, keys)
        masks.append(mask)
    return sum(masks[1:], masks[0]) if masks else None


def _weights(
    context: ParallelContext, local_BHLS: torch.Tensor, average: bool, batched: bool
) -> torch.Tensor:
    """Returns the attention weights of all heads, on every rank."""
    weights = DTensor.from_local(local_BHLS, context.mesh, [Shard(1)], run_check=False)
    averaged = weights.mean(dim=1) if average else weights
    assert isinstance(averaged, DTensor)
    gathered = whole(averaged)
    return gathered if batched else gathered.squeeze(0)
