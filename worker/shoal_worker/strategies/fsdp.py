"""Fully sharded data parallelism: parameters, gradients and optimizer state are sharded over the
ranks, block by block.

Equivalent to zero3, under the name and with the options that users of torch's FSDP know
(`shard_modules`). Per rank: (P+G+O)/N bytes and the largest blocks, two at a time; 3P(N-1)/N bytes
sent per step. (Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.)
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from shoal_worker.strategies.declaration import Strategy
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.optimizer import ShardedOptimizer
from shoal_worker.strategies.zero3 import ZeRO3Model


class FSDPModel(ShardedModel):
    """Parameters, gradients and optimizer state are sharded over the ranks."""

    declaration: ClassVar[Strategy] = dataclasses.replace(ZeRO3Model.declaration, name="fsdp")


class FSDPOptimizer(ShardedOptimizer):
    """The user's optimizer, stepped on this rank's shard."""
