"""Fully sharded data parallelism: parameters, gradients and optimizer state are cut over the ranks, block by block.

What zero3 does, under the name and with the options that users of torch's FSDP know (`shard_modules`). Per rank: (P+G+O)/N bytes and the
largest blocks, two at a time; 3P(N-1)/N bytes sent per step. (Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.)
"""

from __future__ import annotations

import functools
from typing import ClassVar

from shoal_worker.sharding.engine import OPTIONS, SETTINGS, ShardedEngine, in_blocks
from shoal_worker.sharding.unit import Stage
from shoal_worker.strategies.declaration import Strategy
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.optimizer import ShardedOptimizer


class FSDPModel(ShardedModel):
    """Parameters, gradients and optimizer state are cut over the ranks."""

    declaration: ClassVar[Strategy] = Strategy(
        name="fsdp",
        engine=functools.partial(ShardedEngine, stage=Stage.PARAMETERS, groups=in_blocks),
        memory="(P + G + O)/N + two blocks",
        sent="3P(N-1)/N",
        a_death="loses nothing: its shard is mirrored",
        options=OPTIONS,
        settings=SETTINGS | {"shard_modules"},
        compressor="topk",
    )


class FSDPOptimizer(ShardedOptimizer):
    """The user's optimizer, stepped on this rank's shard."""
