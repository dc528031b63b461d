"""The session of this process: found here by loaders, models and the functions of the public API.

Where ranks are threads of one process (`shoal.launch`), each has a session of its own. It is kept with the rank's world, as what torch
keeps per process is: so the threads that a rank starts find it too, and a rank never finds another's, or the process's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal_worker.backends.inmemory_worlds import own_world
from shoal_worker.elastic.contract import StepClock

if TYPE_CHECKING:
    from shoal_worker.elastic.session import Session

_process: list[Session] = []


def current_session() -> Session:
    """The session, made by `shoal.init()`; if the script did not call it, it is called now."""
    session = find_session()
    if session is None:
        from shoal_worker.elastic.start import open_session

        session = open_session()
    return session


def find_session() -> Session | None:
    """The session, if there is one."""
    world = own_world()
    if world is not None:
        found: Session | None = world.session
        return found
    return _process[-1] if _process else None


def set_session(session: Session | None) -> None:
    """Makes `session` the current one, or forgets it with None."""
    world = own_world()
    if world is not None:
        world.session = session
        return
    _process.clear()
    if session is not None:
        _process.append(session)


def current_clock() -> StepClock:
    """The current session as a loader sees it."""
    return current_session().clock
