"""Exit statuses that have a special meaning if a worker or `shoal run` exits with them
(docs/exit-status.md). All other statuses come from the script.

Workers and `shoal run` use the same statuses, so that launchers and batch systems can handle both
in the same way.
"""

from __future__ import annotations

from typing import Final

EVICTED: Final = 75
"""The process ended before the job was finished, because of an event outside the script; a restart
continues the job.

A worker exits with this status if the coordinator has evicted it (expired lease, broken stream,
stalled step), or if its process group broke during user code. Its launcher then replaces it, as if
a signal had killed it. `shoal run` exits with this status if the job is not finished and no worker
is left on this machine.
"""

PREEMPTED: Final = 143
"""SIGTERM arrived before the job was finished. The status is 128 + 15, which shells report for a
process killed by this signal. It is never used for a finished job."""
