"""All-reduces in flight: started one after the other, waited for together. Compressed ones take two turns on the wire: when all have had
their first, each gets its second.

Also when one of them fails all are waited for: the redo of a lost step uses the same memory, and no collective of the old group may write
into it then. A failure does not raise; it marks the step lost, which `optimizer.step()` will say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from shoal_common.errors import MembershipChanged

from shoal_worker.engine.losing import LosingStep
from shoal_worker.failpoints import failpoint

if TYPE_CHECKING:
    from shoal_worker.compression.reduction import Reduction
    from shoal_worker.elastic.group import Group
    from shoal_worker.elastic.replica import StrategySession
    from shoal_worker.engine.compressed import GradientCompression


class Flight:
    """Owned by the training thread, or by the thread that runs the backward pass while the training thread waits for that."""

    def __init__(self, session: StrategySession, compression: GradientCompression | None = None) -> None:
        self._session = session
        self._compression = compression
        self._works: list[tuple[Group, dist.Work]] = []
        self._reductions: list[tuple[Group, Reduction]] = []

    def send(self, tensor: torch.Tensor) -> None:
        """Starts to sum `tensor` over all ranks, in place. Nothing is sent in a step that is lost."""
        step, group = self._session.step, self._session.group
        if step is None or step.lost is not None:
            return
        with LosingStep(self._session):
            if group is None:
                raise MembershipChanged("there is no group")
            work = group.all_reduce_async(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
            if work is not None:
                self._works.append((group, work))

    def send_compressed(self, bucket: torch.Tensor, kind: str, number: int, shapes: Sequence[Sequence[int]]) -> None:
        """Starts to sum `bucket` over all ranks, in place and compressed; see `GradientCompression.start`."""
        step, group, compression = self._session.step, self._session.group, self._compression
        assert compression is not None
        if step is None or step.lost is not None:
            return
        with LosingStep(self._session):
            if group is None:
                raise MembershipChanged("there is no group")
            self._reductions.append((group, compression.start(group, bucket, kind, number, shapes)))

    def land(self) -> bool:
        """Waits for all that were started. True if the step is not lost: all sums are in place."""
        self._finish_compressed()
        works, self._works = self._works, []
        for group, work in works:
            with LosingStep(self._session):
                group.wait(work)
        step = self._session.step
        if step is None or step.lost is not None:
            return False
        with LosingStep(self._session) as completing:
            failpoint("reduction.completed")
        return not completing.failed

    def _finish_compressed(self) -> None:
        """On all ranks in the order in which they were started."""
        reductions, self._reductions = self._reductions, []
        with LosingStep(self._session) as finishing:
            for group, reduction in reductions:
                if not reduction.done:
                    with group.own_collectives("compressed all_reduce"):
                        reduction.advance()
            if reductions:
                failpoint("compression.halfway")
            for group, reduction in reductions:
                if not reduction.done:
                    with group.own_collectives("compressed all_reduce"):
                        reduction.wait()
        if finishing.failed:
            for _, reduction in reductions:
                reduction.abandon()
