"""Waits for collectives of a step, and marks the step as failed if one fails. (For collectives of
tensor-parallel layers, see `mesh/step_group.py`.)"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Final

import torch.distributed as dist
from shoal_common.errors import MembershipChanged
from shoal_common.failpoints import failpoint

from shoal_worker.elastic.contract.step import Step
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.state.strategy_interface import StrategySession


def is_open(session: StrategySession) -> bool:
    """Returns whether a step is in progress whose commit all-reduce has not completed. In such a
    step, the host need not wait for a collective; it suffices that later computation is ordered
    after it. Before the commit all-reduce, the rank waits for all collectives (`Group.settle`), and
    the results are kept only if all have succeeded."""
    step = session.step
    return step is not None and step.control is None


def come_after(session: StrategySession, group: Group, work: dist.Work) -> None:
    """Makes later computation wait for a collective of `group`. In an open step (`is_open`), only
    the device waits; otherwise, this thread waits too.

    Must not be used for results that determine control flow on the host or are used as indices.
    Raises MembershipChanged if the collective failed."""
    if is_open(session):
        group.order(work)
    else:
        group.wait(work)


class LosingStep:
    """Context for collectives of the current step. A failure (`MembershipChanged`) marks the step
    as failed instead of raising an exception in the user's passes.

    After the context has been left, `failed` is True if a collective failed.
    """

    __slots__ = ("_raises_outside", "_session", "failed")

    def __init__(self, session: StrategySession, *, raises_outside: bool = False) -> None:
        """`raises_outside`: True to let failures between steps raise, because the operation that
        they occur in can be repeated."""
        self._session: Final = session
        self._raises_outside: Final = raises_outside
        self.failed = False

    def __enter__(self) -> LosingStep:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, MembershipChanged) or (
            self._raises_outside and self._session.step is None
        ):
            return False
        self.failed = True
        self._session.lifecycle.mark_lost(error)
        return True


def await_reductions(
    session: StrategySession, works: Sequence[tuple[Group, dist.Work]], step: Step | None
) -> bool:
    """Waits for all reductions of `step`, even if one fails, so that none is still writing to
    memory when the step is repeated. Returns True if the step has not failed; all sums are then
    available."""
    for group, work in works:
        with LosingStep(session):
            group.wait(work)
    return step is not None and completes(session, step)


def completes(session: StrategySession, step: Step) -> bool:
    """Returns True if `step` has not failed. Called after its last reduction. Contains a failpoint
    for tests."""
    if step.lost is not None:
        return False
    with LosingStep(session) as completing:
        failpoint("reduction.completed")
    return not completing.failed


def await_ordered(session: StrategySession, group: Group, work: dist.Work) -> bool:
    """Calls `come_after` and returns True, or returns False if the collective has failed. A failure
    in a step marks the step as failed; a failure between steps raises MembershipChanged."""
    with LosingStep(session, raises_outside=True) as waiting:
        come_after(session, group, work)
    return not waiting.failed
