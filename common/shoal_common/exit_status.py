"""Exit statuses with a meaning of their own, of workers and of `shoal run` (docs/exit-status.md).
All others are the script's.

They are the same numbers on both levels, so that whatever starts the one or the other (a launcher,
a batch system) can treat them alike.
"""

from __future__ import annotations

from typing import Final

PUT_OUT: Final = 75
"""It ended before the job was finished, for what happened to it and not for what its script did:
started again, it goes on.

Of a worker: the coordinator has put it out (its lease, its stream, a stall), or its group broke
under code of the user's. Its launcher replaces it as it does one that a signal killed. Of a run:
the job is not finished, and no worker is left here.
"""

PREEMPTED: Final = 143
"""SIGTERM came before the job was finished: 128 + 15, as a shell tells a process that the signal
ended. Never of a finished job."""
