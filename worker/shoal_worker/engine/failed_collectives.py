"""Where an engine's collective that failed makes the step lost. (Those that a tensor-parallel layer issues come to
`mesh/rank_mesh.py::_lose`.)"""

from __future__ import annotations

from types import TracebackType
from typing import Final

from shoal_common.errors import MembershipChanged

from shoal_worker.elastic.strategy_interface import StrategySession


class LosingStep:
    """A context for collectives of the step in progress: where one fails (`MembershipChanged`), the step is marked lost, and nothing is
    raised into the user's passes.

    `failed` tells afterwards whether that happened.
    """

    __slots__ = ("_raises_outside", "_session", "failed")

    def __init__(self, session: StrategySession, *, raises_outside: bool = False) -> None:
        """`raises_outside`: between steps, in an operation that is done again as a whole, the failure is raised."""
        self._session: Final = session
        self._raises_outside: Final = raises_outside
        self.failed = False

    def __enter__(self) -> LosingStep:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if not isinstance(error, MembershipChanged) or (self._raises_outside and self._session.step is None):
            return False
        self.failed = True
        self._session.mark_lost(error)
        return True
