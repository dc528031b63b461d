"""Tells the coordinator of workers' exits: with waitpid the launcher knows of a death before anybody else does.

Blocking calls, for threads of the launcher; a reporter has no state but its client.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import DeadlineError, ShoalError, UnavailableError
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal.launcher.process import ExitStatus

_CALL_DEADLINE: Final = timedelta(seconds=2)
_PATIENCE: Final = timedelta(seconds=60)
_PAUSE_S: Final = 0.2
_OVER: Final = (pb.JOB_PHASE_STOPPING, pb.JOB_PHASE_FINISHED)


@dataclass(frozen=True, kw_only=True)
class ExitReport:
    """What the coordinator knows about a worker that has ended."""

    elastic: bool
    """It had joined the job, or others of this launcher have: the script is elastic."""
    over: bool
    """The job is finished or stops."""


PLAIN: Final = ExitReport(elastic=False, over=False)


class ExitReporter:
    """Reports exits of one launcher's workers."""

    def __init__(self, client: CoordinatorClient, *, job_id: str, launcher_id: str) -> None:
        self._client = client
        self._job_id = job_id
        self._launcher_id = launcher_id
        self._closed = threading.Event()

    def report(self, member_id: str, status: ExitStatus) -> ExitReport:
        """Blocks until the coordinator has heard it: a millisecond, or up to a minute while it is away. A coordinator that cannot be
        reached for so long, or refuses, leaves the worker a plain one."""
        deadline = time.monotonic() + _PATIENCE.total_seconds()
        while True:
            try:
                return self._report(member_id, status)
            except (UnavailableError, DeadlineError):
                if time.monotonic() > deadline or self._closed.wait(_PAUSE_S):
                    return PLAIN
            except ShoalError:
                return PLAIN

    def has_members(self) -> bool:
        """Whether workers of this launcher are members of the job: the script is elastic. False while the coordinator is away."""
        try:
            return self._ours(self._client.get_job(self._job_id, deadline=_CALL_DEADLINE))
        except ShoalError:
            return False

    def close(self) -> None:
        """Reports in progress are given up."""
        self._closed.set()

    def _report(self, member_id: str, status: ExitStatus) -> ExitReport:
        response = self._client.report_exit(self._job_id, member_id, exit_code=status.code, signal=status.signal, deadline=_CALL_DEADLINE)
        job = self._client.get_job(self._job_id, deadline=_CALL_DEADLINE)
        return ExitReport(elastic=response.was_member or self._ours(job), over=job.phase in _OVER)

    def _ours(self, job: pb.GetJobResponse) -> bool:
        return any(member.launcher_id == self._launcher_id for member in job.members)
