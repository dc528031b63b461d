"""Fully sharded data parallelism: parameters, gradients and optimizer state are cut over the ranks, block by block.

What zero3 does, under the name and with the options that users of torch's FSDP know (`shard_modules`). Per rank: (P+G+O)/N bytes and the
largest blocks, two at a time; 3P(N-1)/N bytes sent per step. (Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.)
"""

from __future__ import annotations

from typing import ClassVar

from shoal_worker.strategies.sharded_optimizer import ShardedParametersOptimizer
from shoal_worker.strategies.zero3 import ZeRO3Model


class FSDPModel(ZeRO3Model):
    """Parameters, gradients and optimizer state are cut over the ranks."""

    strategy: ClassVar[str] = "fsdp"


class FSDPOptimizer(ShardedParametersOptimizer):
    """The user's optimizer, stepped on this rank's shard."""
