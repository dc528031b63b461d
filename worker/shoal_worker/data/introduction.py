"""Makes a loader known to the session that it is used under, once to each, and gives it a name there if it has none.

Owns the loader's name. Remembers the session weakly: an iteration may be left while the process ends.
"""

from __future__ import annotations

import weakref

from shoal_worker.elastic.contract import StepClock, StepSource
from shoal_worker.elastic.start import current_clock

_unnamed: weakref.WeakKeyDictionary[StepClock, int] = weakref.WeakKeyDictionary()
"""How many loaders without a name each session has seen. Ranks that are threads of one process have a session each."""


class Introduction:
    """Makes one loader known to the sessions that it meets."""

    def __init__(self, name: str) -> None:
        """`name`: empty for a training loader that was given none."""
        self.name = name
        self._session: weakref.ref[StepClock] | None = None

    def clock(self, source: StepSource) -> StepClock:
        """The session; registers `source`, the loader, with one that it meets for the first time."""
        clock = current_clock()
        if self.met is not clock:
            if not self.name:
                _unnamed[clock] = _unnamed.get(clock, 0) + 1
                self.name = "loader" if _unnamed[clock] == 1 else f"loader-{_unnamed[clock]}"
            self._session = weakref.ref(clock)
            clock.register_source(source)
        return clock

    @property
    def met(self) -> StepClock | None:
        """The session met last, if it is still there."""
        return self._session() if self._session is not None else None
