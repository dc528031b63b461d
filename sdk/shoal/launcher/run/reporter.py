"""Reports the exits of workers to the coordinator, and asks it about the job. The launcher learns
of a worker's death before the coordinator does, through waitpid.

Calls block and are made on threads of the launcher. A reporter has no state except its client.
Unknown facts are None or JobEnd.UNKNOWN and have no consequences: running workers are not affected
by a coordinator that is unreachable or has lost its data.
"""

from __future__ import annotations

import contextlib
import os
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

from shoal.launcher.clusters.cluster_keeper import NOBODY
from shoal.launcher.processes.process import ExitStatus
from shoal.launcher.workers.environment import machine_name
from shoal.launcher.workers.policy import JobEnd

_CALL_DEADLINE: Final = timedelta(seconds=2)
_PATIENCE: Final = timedelta(seconds=60)
_PAUSE_S: Final = 0.2
_LONGEST_TEXT: Final = 1024
_REFUSING: Final = (pb.MACHINE_CONDITION_UNHEALTHY, pb.MACHINE_CONDITION_EXCLUDED)
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
    """Human-readable reason why the job ended."""
    holders: int
    """Number of members that hold all or part of the training state, because they have a rank or
    have committed a step. While the job is waiting for more workers, no member has a rank."""
    refused: str
    """Reason why the job refuses this machine; empty if the machine is not refused."""
    unhealthy: bool
    """True if the job refuses this machine because a health check failed."""
    ours: int
    """Number of members started by this launcher."""


@dataclass(frozen=True, kw_only=True)
class ExitReport:
    """The coordinator's response to the report of a worker's exit."""

    was_member: bool
    rank: int
    """Last rank of the worker; -1 if the worker had none or its rank is unknown."""
    job: JobNews


class ExitReporter:
    """Reports the exits of one launcher's workers, and asks the coordinator about their job."""

    def __init__(self, client: CoordinatorClient, *, job_id: str, launcher_id: str) -> None:
        self._client = client
        self._job_id = job_id
        self._launcher_id = launcher_id
        self._host = machine_name(os.environ)
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
        """Reports a worker's exit. Blocks until the coordinator has received the report: usually
        for a millisecond, or for up to a minute while the coordinator is unreachable or does not
        know the job. Returns None after that time, or if the coordinator rejects the report.

        Args:
            member_id: id of the worker as a member.
            status: exit status of its process.
            key: the member's key.
            failure: if not empty, the job fails for this reason.
            finished: True if the worker has recorded that its script finished.
        """
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
        """Returns the state of the job. Returns None if the coordinator could not be asked or does
        not know the job. Blocks for at most 2 s."""
        try:
            job = self._client.get_job(self._job_id, deadline=_CALL_DEADLINE)
        except ShoalError:
            return None
        refusals = [
            machine
            for machine in job.machines
            if machine.host == self._host and machine.condition in _REFUSING
        ]
        ours = sum(member.launcher_id == self._launcher_id for member in job.members)
        return JobNews(
            end=_ENDS[job.ending],
            why=job.ending_reason,
            holders=sum(member.rank >= 0 or member.progress.step > 0 for member in job.members),
            refused=refusals[0].reason if refusals else "",
            unhealthy=bool(refusals) and refusals[0].condition == pb.MACHINE_CONDITION_UNHEALTHY,
            ours=ours,
        )

    def report_leaving(self, reason: str) -> None:
        """Reports that this machine will be reclaimed. Blocks for at most 2 s. Never raises an
        error, because the report is only shown to users."""
        self._report_machine(pb.MACHINE_CONDITION_LEAVING, reason)

    def report_health(self, failure: str) -> None:
        """Reports a failed health check of this machine or, if `failure` is empty, that all checks
        passed. Like `report_leaving`, blocks for at most 2 s and never raises an error."""
        if failure:
            self._report_machine(pb.MACHINE_CONDITION_UNHEALTHY, failure)
        else:
            self._report_machine(pb.MACHINE_CONDITION_HEALTHY, "all health checks passed")

    def clock_offset(self) -> tuple[timedelta, timedelta] | None:
        """Returns the coordinator's clock minus this machine's clock, and the uncertainty of this
        difference. Returns None if the coordinator could not be asked. Blocks for at most 2 s."""
        before_s = time.time()
        try:
            job = self._client.get_job(self._job_id, member_id=NOBODY, deadline=_CALL_DEADLINE)
        except ShoalError:
            return None
        after_s = time.time()
        offset_s = job.now_unix_ms / 1000 - (before_s + after_s) / 2
        return timedelta(seconds=offset_s), timedelta(seconds=abs(after_s - before_s) / 2)

    def _report_machine(self, condition: pb.MachineCondition, reason: str) -> None:
        with contextlib.suppress(ShoalError):
            self._client.report_machine(
                self._job_id,
                self._host,
                condition,
                reason=reason[:_LONGEST_TEXT],
                deadline=_CALL_DEADLINE,
            )

    def is_evicted(self, member_id: str) -> bool:
        """Returns whether the coordinator has evicted a member. No other member then waits for its
        process. Blocks for at most 2 s."""
        try:
            return bool(
                self._client.get_job(
                    self._job_id, member_id=member_id, deadline=_CALL_DEADLINE
                ).member_put_out
            )
        except ShoalError:
            return False

    def missing_servers(self) -> str:
        """Returns a line about missing parameter servers that training is waiting for; empty if
        none is missing or the coordinator could not be asked. Blocks for at most 2 s."""
        try:
            job = self._client.get_job(self._job_id, member_id=NOBODY, deadline=_CALL_DEADLINE)
        except ShoalError:
            return ""
        return job.waits_for if job.servers_awaited else ""

    def events(self, after: str) -> list[pb.Event]:
        """Returns the job's events after the event with id `after`; all events if `after` is empty.
        Blocks for at most 2 s. Raises ShoalError."""
        return list(
            self._client.watch_events(self._job_id, after_event_id=after, deadline=_CALL_DEADLINE)
        )

    def close(self) -> None:
        """Makes calls to `report` that are still in progress give up."""
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
