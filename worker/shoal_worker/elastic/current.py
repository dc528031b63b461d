"""The session of this process, where it has one; `start.current_session` makes one where it has none.

Where ranks are threads of one process (`shoal.launch`), each has a session of its own. It is kept with the rank's world, as what torch
keeps per process is: so the threads that a rank starts find it too, and a rank never finds another's, or the process's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal_worker.backends.worlds import own_world

if TYPE_CHECKING:
    from shoal_worker.elastic.session import Session

_process: list[Session] = []


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
