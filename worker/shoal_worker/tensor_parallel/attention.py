"""Attention with heads that are split across ranks. Each rank computes its own heads, without
communication.

Shapes: B batch, H heads, T queries, S keys, D head size.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shoal_worker.tensor_parallel.context import (
    DropoutRandomness,
    ParallelContext,
    local_offset,
    placement_of,
    split_dimension,
)

# ------------------------------------------------------------------------------------------ dropout
#
# Dropout within a tensor-parallel block: shards of one activation must draw different random
# numbers, and replicas the same numbers. Both require that all ranks of a group begin a step with
# the same default random state. Shoal's loaders set this state for each batch; without a loader,
# the strategy sets it (mesh/rank_mesh.py).


@dataclass(frozen=True, kw_only=True)
class LocalSlice:
    """Location of this rank's part of a tensor in the full tensor."""

    dimension: int
    start: int
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    stride: tuple[int, ...] | None = None
    """Stride of the full tensor; None: contiguous. Needed because a single process draws random
    numbers in memory order."""


def slice_of(tensor: DTensor) -> LocalSlice | None:
    """Returns this rank's slice of a tensor; None if every rank has the full tensor."""
    dimension = split_dimension(tensor)
    if dimension is None:
        return None
    return LocalSlice(
        dimension=dimension,
        start=local_offset(tensor, dimension),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
    )


def dropout(
    context: ParallelContext,
    activation: DTensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> DTensor:
    """Applies F.dropout to a DTensor. Never works in place."""
    if not training or p == 0:
        return activation
    cut = slice_of(activation)
    if cut is None and not placement_of(activation).is_replicate():
        activation = activation.redistribute(placements=[Replicate()])
    dropped = drop(context, activation.to_local(), cut, p)
    return DTensor.from_local(
        dropped,
        activation.device_mesh,
        activation.placements,
        run_check=False,
        shape=activation.shape,
        stride=activation.stride(),
    )


def drop(
    context: ParallelContext, local: torch.Tensor, cut: LocalSlice | None, p: float
) -> torch.Tensor:
    """Applies dropout with probability `p` to this rank's part of an activation."""
    if cut is None:
        return F.dropout(local, p)
    if context.dropout is DropoutRandomness.PER_SHARD:
        with shard_randomness(context, local.device):
            return F.dropout(local, p)
    strides = cut.stride or torch.empty(cut.shape, device="meta").stride()
    mask = (
        torch.empty_strided(cut.shape, strides, dtype=local.dtype, device=local.device)
        .bernoulli_(1 - p)
        .div_(1 - p)
    )
    return local * mask.narrow(cut.dimension, cut.start, local.shape[cut.dimension])


@contextlib.contextmanager
def shard_randomness(context: ParallelContext, device: torch.device) -> Iterator[None]:
    """Context in which each rank draws different random numbers. If all ranks' default generators
    are in the same state before, they are in the same state afterwards.

    The seed is drawn from the default generator. Activation checkpointing restores that generator
    before a recomputation, which therefore draws the same seed.
    """
    seed = int(torch.empty((), dtype=torch.int64).random_())
    generator = (
        torch.default_generator
        if device.type == "cpu"
        else torch.get_device_module(device).default_generators[device.index]
    )
    state = generator.get_state()
    try:
        generator.manual_seed((seed + 0x9E3779B97F4A7C15 * (context.rank + 1)) % 2**63)
        yield
    finally:
        generator.set_state(state)


# ruff: noqa: N803, N806 - shapes as suffixes


# ---------------------------------------------------------------------------------------- attention


def scaled_dot_product_attention(
    context: ParallelContext,
    query_BHTD: DTensor,
    key_BHSD: DTensor,
    value_BHSD: DTensor,
    attn_mask: DTensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> DTensor:
    """Implements F.scaled_dot_product_attention on DTensors. Each rank computes its own heads (or
    its part of the batch); tensors that are split in any other way are gathered first."""
    tensors = [query_BHTD, key_BHSD, value_BHSD]
    cuts = {split_dimension(t) for t in tensors}
    dimension = cuts.pop() if len(cuts) == 1 else None
    placement = (
        Replicate() if dimension is None or dimension >= query_BHTD.ndim - 2 else Shard(dimension)
    )
    tensors = [t.redistribute(placements=[placement]) for t in tensors]
    query, key, value = (t.to_local() for t in tensors)
    mask = None if attn_mask is None else _local_mask(attn_mask, tensors[0])
    cut = slice_of(tensors[0])
    if dropout_p and cut is not None and context.dropout is DropoutRandomness.AS_ONE_PROCESS:
        weights_cut = LocalSlice(
            dimension=cut.dimension, start=cut.start, shape=(*cut.shape[:-1], key.shape[-2])
        )
        output, _ = attend(
            context,
            query,
            key,
            value,
            mask,
            weights_cut,
            dropout_p=dropout_p,
            is_causal=is_causal,
            **options,
        )
    elif dropout_p and cut is not None:
        with shard_randomness(context, query.device):
            output = F.scaled_dot_product_attention(
                query, key, value, mask, dropout_p, is_causal, **options
            )
    else:
        output = F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, **options
        )
    return DTensor.from_local(output, context.mesh, [placement], run_check=False)


def attend(
    context: ParallelContext,
    query_BHTD: torch.Tensor,
    key_BHSD: torch.Tensor,
    value_BHSD: torch.Tensor,
    mask: torch.Tensor | None,
    weights_cut: LocalSlice | None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention on local tensors, with separate operations instead of a fused kernel.
    Returns the output, and the weights after dropout. `weights_cut`: this rank's slice of the
    weights, with dimensions BHTS."""
    if enable_gqa:
        groups = query_BHTD.shape[-3] // key_BHSD.shape[-3]
        key_BHSD, value_BHSD = (t.repeat_interleave(groups, dim=-3) for t in (key_BHSD, value_BHSD))
    scores_BHTS = (
        query_BHTD
        @ key_BHSD.transpose(-2, -1)
        * (scale if scale is not None else 1 / math.sqrt(query_BHTD.shape[-1]))
    )
    if is_causal:
        mask = torch.ones(
            scores_BHTS.shape[-2:], dtype=torch.bool, device=scores_BHTS.device
        ).tril()
    if mask is not None:
        scores_BHTS = (
            scores_BHTS.masked_fill(~mask, -math.inf)
            if mask.dtype == torch.bool
            else scores_BHTS + mask
        )
    weights_BHTS = scores_BHTS.softmax(-1)
    if dropout_p:
        weights_BHTS = drop(context, weights_BHTS, weights_cut, dropout_p)
    return weights_BHTS @ value_BHSD, weights_BHTS


def _local_mask(mask: DTensor, query: DTensor) -> torch.Tensor:
    """Returns the mask's part for this rank's heads; the full mask if it is the same for all
    heads."""
    dimension = split_dimension(query)
    own = None if dimension is None else dimension - query.ndim + mask.ndim
    if own is None or own < 0 or mask.shape[own] == 1:
        whole = mask.redistribute(placements=[Replicate()])
        return (
            whole.to_local() if dimension is None else whole.to_local(grad_placements=[Partial()])
        )
    return mask.redistribute(placements=[Shard(own)]).to_local()
