"""Data parallelism. Every rank has a full copy of the model and the optimizer, and each step
averages the gradients across all ranks.

Cost per rank: memory for all parameters, gradients and optimizer state; 2P(N-1)/N bytes sent per
step in a ring all-reduce (P: bytes of parameters, N: number of ranks). For any optimizer, the
result is the same as on a single process with the whole batch, because the ranks average gradients
rather than parameters. (Li et al., "PyTorch Distributed", VLDB 2020, section 3; Goyal et al., 2017,
section 3 on the reason to average gradients.)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import ClassVar, cast

from shoal_worker.replicated.engine import ReplicatedEngine
from shoal_worker.sparse_tables.step_tables import step_tables
from shoal_worker.strategies.declaration import Strategy
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.optimizer import ShardedOptimizer


class DDPModel(ShardedModel):
    """A full replica of the model on every rank."""

    declaration: ClassVar[Strategy] = Strategy(
        name="ddp",
        engine=lambda setup: ReplicatedEngine(setup, step_tables(setup)),
        memory="P + G + O",
        sent="2P(N-1)/N",
        a_death="nothing is lost: every rank has the full state",
        compressor="powersgd",
        complex_parameters=True,
        keeps_memory=True,
        sparse_tables=True,
        communicates_in_passes=True,
        several_models=True,
    )

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward passes only accumulate this rank's gradients, as in
        torch's DDP. The next backward pass outside of the context reduces the accumulated
        gradients; if there is none, `optimizer.step()` does."""
        return cast(ReplicatedEngine, self.engine).no_sync()


class DDPOptimizer(ShardedOptimizer):
    """The user's optimizer, stepped on every rank with the averaged gradients."""
