"""A unit's reduce-scatter, compressed: in the place of the collectives' own where the model has `gradient_compression=`.

As with those (`collectives.py`) a failure never raises out of a pass: the step is marked lost and the result is zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from shoal_common.errors import MembershipChanged

from shoal_worker.compression.reduction import Reduction
from shoal_worker.engine.losing import LosingStep
from shoal_worker.sharding.collectives import Pending

if TYPE_CHECKING:
    from shoal_worker.elastic.group import Group
    from shoal_worker.elastic.replica import StrategySession
    from shoal_worker.engine.compressed import GradientCompression


class CompressedScatter:
    """Scatters one unit's gradients, compressed."""

    def __init__(self, compression: GradientCompression, session: StrategySession, number: int) -> None:
        """`number`: of the unit, the same on all ranks."""
        self._compression = compression
        self._session = session
        self._number = number

    def __call__(self, shard: torch.Tensor, full: torch.Tensor) -> Pending:
        """See `Collectives.reduce_scatter`."""
        session, group = self._session, self._session.group
        step = session.step
        with LosingStep(session):
            if step is not None and step.lost is not None:
                raise MembershipChanged(step.lost)
            if group is None or group.world_size == 1:
                self._compression.pay(full, "units", self._number)
                shard.copy_(full)
                return _Scattering(session, None, None, shard)
            return _Scattering(session, group, self._compression.start_scatter(group, shard, full, self._number), shard)
        shard.zero_()
        return _Scattering(session, None, None, None)


class _Scattering:
    def __init__(self, session: StrategySession, group: Group | None, reduction: Reduction | None, shard: torch.Tensor | None) -> None:
        """`shard`: None: the step is lost. `reduction`: None: nothing is to be waited for."""
        self._session = session
        self._group = group
        self._reduction = reduction
        self._shard = shard

    def wait(self) -> bool:
        """See `Pending`."""
        group, reduction, shard = self._group, self._reduction, self._shard
        del self._group, self._reduction  # they keep sockets open
        if shard is None or group is None or reduction is None:
            return shard is not None
        with LosingStep(self._session) as waiting, group.own_collectives("compressed reduce_scatter"):
            reduction.wait()
        if waiting.failed:
            reduction.abandon()
            shard.zero_()
        return not waiting.failed
