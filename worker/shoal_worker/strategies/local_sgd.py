"""Local SGD. Every rank trains its own replica on its own samples, and the ranks average their
parameters every `sync_every` steps.

Cost per rank: memory as for ddp, plus a copy of parameters and optimizer state during a round;
2P(N-1)/(N k) bytes sent per step if the ranks average every k steps (P: bytes of parameters, N:
number of ranks). The result differs from ddp, except with k = 1 and plain SGD. (Stich, "Local SGD
Converges Fast and Communicates Little", ICLR 2019; McMahan et al., "Communication-Efficient
Learning", AISTATS 2017, algorithm 1.)
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import ClassVar, cast

from shoal_worker.replicated.local_sgd import LocalSGDEngine
from shoal_worker.replicated.rounds import RoundOptions
from shoal_worker.strategies.declaration import Strategy
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.optimizer import ShardedOptimizer


class LocalSGDModel(ShardedModel):
    """A full replica of the model on every rank. Ranks train their replicas separately and average
    them at the end of each round."""

    declaration: ClassVar[Strategy] = Strategy(
        name="local_sgd",
        engine=LocalSGDEngine,
        memory="P + G + O",
        sent="2P(N-1)/(N k)",
        a_death="the round is repeated",
        options=frozenset(field.name for field in dataclasses.fields(RoundOptions)),
        complex_parameters=True,
        why_one_model="its ranks average parameters after a fixed number of steps, and models "
        "whose optimizers skip some batches would reach that number at different times. For "
        "slow links, ddp with gradient_compression= is an alternative",
    )

    @property
    def steps_in_round(self) -> int:
        """Number of steps since the last average. If it is 0, the parameters have just been
        averaged, so they are the same on all ranks."""
        return cast(LocalSGDEngine, self.engine).steps_in_round

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context without effect, because this strategy never reduces gradients."""
        return cast(LocalSGDEngine, self.engine).no_sync()


class LocalSGDOptimizer(ShardedOptimizer):
    """The user's optimizer, stepped on every rank with that rank's own gradients. The last step of
    a round averages the parameters. If averaging fails, `step` returns LOST, and the round is
    repeated from its start."""
