"""Dropout within a tensor-parallel block: shards of one activation must draw different numbers, replicas the same ones.

Both rest on the ranks of a group having the same default random state when a step begins. Shoal's loaders set it for each batch; where
there is none, the strategy does (mesh/division.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.distributed.tensor import DTensor, Replicate

from shoal_worker.tensor_parallel.context import DropoutRandomness, ParallelContext, local_offset, placement_of, split_dimension


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which part of a whole a rank's tensor is."""

    dimension: int
    start: int
    shape: tuple[int, ...]
    """Shape of the whole."""
    stride: tuple[int, ...] | None = None
    """Stride of the whole; None: contiguous. One process draws in the order of memory."""


def cut_of(tensor: DTensor) -> Cut | None:
    """None: every rank holds it whole."""
    dimension = split_dimension(tensor)
    if dimension is None:
        return None
    return Cut(dimension=dimension, start=local_offset(tensor, dimension), shape=tuple(tensor.shape), stride=tensor.stride())


def dropout(context: ParallelContext, activation: DTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> DTensor:
    """F.dropout on a DTensor. Never in place."""
    if not training or p == 0:
        return activation
    cut = cut_of(activation)
    if cut is None and not placement_of(activation).is_replicate():
        activation = activation.redistribute(placements=[Replicate()])
    dropped = drop(context, activation.to_local(), cut, p)
    return DTensor.from_local(
        dropped, activation.device_mesh, activation.placements, run_check=False, shape=activation.shape, stride=activation.stride()
    )


def drop(context: ParallelContext, local: torch.Tensor, cut: Cut | None, p: float) -> torch.Tensor:
    """Dropout with probability `p` on this rank's part of an activation."""
    if cut is None:
        return F.dropout(local, p)
    if context.dropout is DropoutRandomness.PER_SHARD:
        with shard_randomness(context, local.device):
            return F.dropout(local, p)
    strides = cut.stride or torch.empty(cut.shape, device="meta").stride()
    mask = torch.empty_strided(cut.shape, strides, dtype=local.dtype, device=local.device).bernoulli_(1 - p).div_(1 - p)
    return local * mask.narrow(cut.dimension, cut.start, local.shape[cut.dimension])


@contextlib.contextmanager
def shard_randomness(context: ParallelContext, device: torch.device) -> Iterator[None]:
    """Within, this rank draws numbers of its own. All ranks' default generators stand alike afterwards, if they did before.

    The seed is drawn from the default generator, so activation checkpointing, which sets that back, draws the same again.
    """
    seed = int(torch.empty((), dtype=torch.int64).random_())
    generator = torch.default_generator if device.type == "cpu" else torch.get_device_module(device).default_generators[device.index]
    state = generator.get_state()
    try:
        generator.manual_seed((seed + 0x9E3779B97F4A7C15 * (context.rank + 1)) % 2**63)
        yield
    finally:
        generator.set_state(state)
