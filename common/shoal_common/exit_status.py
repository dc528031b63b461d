"""Exit statuses with a special meaning, for workers and for `shoal run` (docs/exit-status.md). All
others come from the script.

They are the same on both levels, so that a launcher and a batch system can treat them alike.
"""

from __future__ import annotations

from typing import Final

PUT_OUT: Final = 75
"""The process ended before the job was finished because of an external event rather than an error
of the script; a restart continues the job.

For a worker: the coordinator has evicted it (lease, stream, stall), or its group broke during user
code. Its launcher replaces it like one killed by a signal. For a run: the job is not finished, and
no worker is left here.
"""

PREEMPTED: Final = 143
"""SIGTERM arrived before the job was finished: 128 + 15, as a shell reports a process ended by the
signal. Never used for a finished job."""
