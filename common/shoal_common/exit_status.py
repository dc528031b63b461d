"""Exit statuses with a special meaning, for workers and for `shoal run` (docs/exit-status.md). All
other statuses come from the script.

Workers and `shoal run` use the same statuses, so that a launcher and a batch system can treat them
alike.
"""

from __future__ import annotations

from typing import Final

PUT_OUT: Final = 75
"""The process ended before the job was finished because of an external event rather than an error
of the script; a restart continues the job.

A worker exits with this status if the coordinator has evicted it (lease, stream, stall), or if its
group broke during user code. Its launcher then replaces it, as after a kill by a signal. `shoal
run` exits with this status if the job is not finished and no worker is left on this machine.
"""

PREEMPTED: Final = 143
"""SIGTERM arrived before the job was finished: 128 + 15, as a shell reports a process ended by the
signal. Never used for a finished job."""
