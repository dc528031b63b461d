"""What optimizers have in common whose ranks come and go: they tell who wants to know.

Nothing has to be done about a change: the global batch stays what it is, so learning rate and schedule do, too, and steps that a fault made
void are taken again. It is for what lies outside of training: logging, the number of data workers, a cost account.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal_worker.elastic.contract import Placement, StepStatus
from shoal_worker.elastic.session import Session
from shoal_worker.strategies.base_optimizer import ShardedOptimizer

MembershipCallback = Callable[[Placement, Placement], object]
"""Called with where this process stood, and where it stands now."""


class ElasticOptimizer(ShardedOptimizer):
    """An optimizer that goes on with other ranks when some die, leave or join. `as_distributed` makes it."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: Any, session: Session) -> None:
        super().__init__(optimizer, model, session)
        self._callbacks: list[MembershipCallback] = []
        self._stood: Placement | None = None

    @property
    def membership(self) -> Placement:
        """Where this process stands now: `generation`, `rank` and `world_size`."""
        session = self._session
        return Placement(generation=session.generation, rank=session.rank, world_size=session.world_size)

    def on_membership_change(self, callback: MembershipCallback) -> None:
        """`callback(before, after)` is called on the training thread at the end of the first `step()` that finds other ranks than the one
        before it, on every rank that had taken that. What it raises comes out of `step()`, which has done its work then."""
        self._callbacks.append(callback)

    def _finish(self) -> StepStatus:
        status = super()._finish()
        before, self._stood = self._stood, self.membership
        if before is not None and before.generation != self._stood.generation:
            for callback in self._callbacks:
                callback(before, self._stood)
        return status
