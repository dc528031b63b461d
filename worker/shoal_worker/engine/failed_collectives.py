"""Where an engine waits for collectives of a step, and where one that failed makes the step lost.
(Those that a tensor-parallel layer issues come to `mesh/step_group.py`.)"""

from __future__ import annotations

from types import TracebackType
from typing import Final

import torch.distributed as dist
from shoal_common.errors import MembershipChanged

from shoal_worker.elastic.group import Group
from shoal_worker.elastic.strategy_interface import StrategySession


def is_open(session: StrategySession) -> bool:
    """A step is in progress whose closing is to come: it asks for all that was ordered
    (`Group.settle`), and nothing that was computed in the step is kept unless that ended well."""
    step = session.step
    return step is not None and step.control is None


def come_after(session: StrategySession, group: Group, work: dist.Work) -> None:
    """Has what is computed next come after a collective of `group`: in an open step the device
    waits for it, else this thread.

    Not for results by which the host decides, or that are indices. Raises MembershipChanged: it
    failed.
    """
    if is_open(session):
        group.order(work)
    else:
        group.wait(work)


class LosingStep:
    """A context for collectives of the step in progress: where one fails (`MembershipChanged`), the
    step is marked lost, and nothing is raised into the user's passes.

    `failed` tells afterwards whether that happened.
    """

    __slots__ = ("_raises_outside", "_session", "failed")

    def __init__(self, session: StrategySession, *, raises_outside: bool = False) -> None:
        """`raises_outside`: between steps, in an operation that is done again as a whole, the
        failure is raised."""
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
        self._session.mark_lost(error)
        return True
