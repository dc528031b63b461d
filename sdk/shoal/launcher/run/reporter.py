"""Reports workers' exits to the coordinator and asks it about the job: through waitpid the launcher
learns of a death before anybody else.

Blocking calls, for threads of the launcher; a reporter has no state except its client. Unknown
facts are None or JobEnd.UNKNOWN, which means nothing else: a coordinator that is away, or has lost
its data, says nothing about live members.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import (
    DeadlineError,
    PreconditionError,
    ShoalError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal.launcher.clusters.keeper import NOBODY
from shoal.launcher.processes.process import ExitStatus
from shoal.launcher.workers.policy import JobEnd

_CALL_DEADLINE: Final = timedelta(seconds=2)
_PATIENCE: Final = timedelta(seconds=60)
_PAUSE_S: Final = 0.2
_LONGEST_TEXT: Final = 1024
_ENDS: Final = {
    pb.JOB_ENDING_UNSPECIFIED: JobEnd.NONE,
    pb.JOB_ENDING_COMPLETED: JobEnd.COMPLETED,
    pb.JOB_ENDING_STOPPED: JobEnd.STOPPED,
    pb.JOB_ENDING_FAILED: JobEnd.FAILED,
}


@dataclass(frozen=True, kw_only=True)
class JobNews:
    """State of the job according to the coordinator."""

    end: JobEnd
    why: str
    """For people."""
    holders: int
    """Number of members that have a rank or have committed a step: they hold the training state, or
    parts of it. While the job waits for more workers, none has a rank."""
    ours: int
    """Number of members started by this launcher."""


@dataclass(frozen=True, kw_only=True)
class ExitReport:
    """Knowledge of the coordinator about a worker that has ended."""

    was_member: bool
    rank: int
    """Last rank; -1 if none or unknown."""
    job: JobNews


class ExitReporter:
    """Reports exits of one launcher's workers."""

    def __init__(self, client: CoordinatorClient, *, job_id: str, launcher_id: str) -> None:
        self._client = client
        self._job_id = job_id
        self._launcher_id = launcher_id
        self._closed = threading.Event()

    def report(
        self,
        member_id: str,
        status: ExitStatus,
        *,
        key: str = "",
        failure: str = "",
        finished: bool = False,
    ) -> ExitReport | None:
        """Reports an exit. Blocks until the coordinator has received it: a millisecond, or up to a
        minute while it is away or does not know the job. Returns None on timeout or refusal. `key`:
        the member's. `failure`: if not empty, the job fails with it. `finished`: the worker
        reported that its script finished."""
        deadline = time.monotonic() + _PATIENCE.total_seconds()
        while True:
            try:
                return self._report(member_id, status, key, failure[:_LONGEST_TEXT], finished)
            except PreconditionError as error:
                news = self.news() if error.reason == "RUN_ENDED" else None
                return None if news is None else ExitReport(was_member=False, rank=-1, job=news)
            except (UnavailableError, DeadlineError, UnknownResourceError):
                if time.monotonic() > deadline or self._closed.wait(_PAUSE_S):
                    return None
            except ShoalError:
                return None

    def news(self) -> JobNews | None:
        """Returns the news of the job; None: the coordinator could not be asked, or does not know
        the job. Blocks for 2 s at most."""
        try:
            job = self._client.get_job(self._job_id, deadline=_CALL_DEADLINE)
        except ShoalError:
            return None
        ours = sum(member.launcher_id == self._launcher_id for member in job.members)
        return JobNews(
            end=_ENDS[job.ending],
            why=job.ending_reason,
            holders=sum(member.rank >= 0 or member.progress.step > 0 for member in job.members),
            ours=ours,
        )

    def is_put_out(self, member_id: str) -> bool:
        """Returns whether the coordinator has evicted a member, i.e. it is no longer one and did
        not leave: nobody waits for its process. Blocks for at most 2 s."""
        try:
            return bool(
                self._client.get_job(
                    self._job_id, member_id=member_id, deadline=_CALL_DEADLINE
                ).member_put_out
            )
        except ShoalError:
            return False

    def missing_servers(self) -> str:
        """Returns a line about the parameter servers without which training cannot begin; empty if
        none is missing or the coordinator could not be asked. Blocks for at most 2 s."""
        try:
            job = self._client.get_job(self._job_id, member_id=NOBODY, deadline=_CALL_DEADLINE)
        except ShoalError:
            return ""
        return job.waits_for if job.servers_awaited else ""

    def events(self, after: str) -> list[pb.Event]:
        """Returns the job's events after the event `after`; "": from the beginning. Blocks for at
        most 2 s. Raises ShoalError."""
        return list(
            self._client.watch_events(self._job_id, after_event_id=after, deadline=_CALL_DEADLINE)
        )

    def close(self) -> None:
        """Abandons reports in progress."""
        self._closed.set()

    def _report(
        self, member_id: str, status: ExitStatus, key: str, failure: str, finished: bool
    ) -> ExitReport:
        response = self._client.report_exit(
            self._job_id,
            member_id,
            key=key,
            exit_code=status.code,
            signal=status.signal,
            failure=failure,
            finished=finished,
            deadline=_CALL_DEADLINE,
        )
        news = self.news()
        if news is None:
            raise UnavailableError("the coordinator was lost between two calls")
        return ExitReport(was_member=response.was_member, rank=response.rank, job=news)
