"""The session of this process: found here by loaders, models and the functions of the public API.

A session belongs to the thread that made it when ranks are threads (`launch(backend="inmemory")`), and to the whole process otherwise:
a thread without one of its own sees the process's.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from shoal_worker.elastic.contract import StepClock

if TYPE_CHECKING:
    from shoal_worker.elastic.session import Session

_process: list[Session] = []
_thread = threading.local()


def current_session() -> Session:
    """The session, made by `shoal.init()`; a world of one is made if the script did not call it."""
    session = find_session()
    if session is None:
        from shoal_worker.elastic.start import open_session

        session = open_session()
    return session


def find_session() -> Session | None:
    """The session, if there is one."""
    own: Session | None = getattr(_thread, "session", None)
    return own or (_process[-1] if _process else None)


def set_session(session: Session | None, *, thread_only: bool = False) -> None:
    """Makes `session` the current one, or forgets it with None."""
    if thread_only:
        _thread.session = session
        return
    _process.clear()
    if session is not None:
        _process.append(session)


def current_clock() -> StepClock:
    """The current session as a loader sees it."""
    return current_session().clock
