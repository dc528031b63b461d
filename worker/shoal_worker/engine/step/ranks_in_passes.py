"""Communication with other ranks in the middle of a forward or backward pass, for synchronized
normalization layers and for losses that are computed from the global batch.

Each generation has a separate process group for this purpose. During a backward pass, ranks may
start gradient reductions at different times, if they use different parameters. If gathers used the
same group as these reductions, one rank's gather could be matched with another rank's reduction.

A failed gather marks the step as failed and does not raise an exception in the pass
(`failed_collectives.py`). Methods are called on the training thread, or on the autograd thread of a
backward pass while the training thread waits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from shoal_common.errors import MembershipChanged

from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.state.strategy_interface import StrategySession
from shoal_worker.engine.step.failed_collectives import LosingStep


class RanksInPasses:
    """Gathers tensors from all ranks in the passes of a step. All ranks must gather in the same
    order."""

    def __init__(self, session: StrategySession, name: str) -> None:
        """`name`: connection name, such as "synchronized norms"."""
        self._session = session
        self._name = name
        self._generation: Group | None = None
        """Main group of the generation that `_apart` was created for."""
        self._apart: Group | None = None

    @property
    def weight(self) -> float | None:
        """This rank's fraction of the total weight of the step's samples, from 0 to 1. None if the
        current pass is not part of a step with several ranks."""
        session = self._session
        step = session.step
        if step is None or step.share is None or session.is_joining:
            return None
        if session.group is None or session.group.world_size == 1 or step.lost is not None:
            return None
        return step.share.weight / step.share.total_weight if step.share.total_weight else 0.0

    @property
    def in_micro_batches(self) -> bool:
        """True if this pass belongs to a micro-batch of a step. The number of micro-batches may
        differ between ranks."""
        step = self._session.step
        return step is not None and step.in_micro_batches and not self._session.is_joining

    @torch.no_grad()
    def gather(
        self, own: torch.Tensor, *, before: Callable[[], None] = lambda: None
    ) -> torch.Tensor | None:
        """Gathers `own`, which must have the same number of elements on every rank. Returns one
        flattened row per rank, or None if the step has failed. `before`: function called once the
        ranks are connected, before the gather; if it raises MembershipChanged, the step fails."""
        step = self._session.step
        if step is None or step.lost is not None:
            return None
        with LosingStep(self._session) as gathering:
            group = self._connected()
            before()
            sent = own.to(group.device)
            rows = sent.new_empty(group.world_size * sent.numel())
            group.wait(group.all_gather_async(rows, sent))
        return None if gathering.failed else rows.view(-1, own.numel()).to(own.device)

    @property
    def rank(self) -> int:
        """Index of this rank's row in the last gathered result."""
        return self._apart.rank if self._apart is not None else 0

    def _connected(self) -> Group:
        group = self._session.group
        if group is None:
            raise MembershipChanged("there is no group")
        if self._apart is None or self._generation is not group:
            self._apart = group.connected_again(self._name)
            self._generation = group
        return self._apart
