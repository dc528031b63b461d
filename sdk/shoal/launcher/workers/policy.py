"""Decides how a launcher reacts to the exit of a worker, and determines the launcher's exit status.
A pure state machine that maps exits to actions, without clocks or processes.

Workers of a plain script form a unit, as with torchrun: if one fails, the others are stopped, and
either all workers or none are restarted.

Elastic workers (workers that have joined the job) are replaced individually while the others
continue, if the cause is unlikely to recur: a signal or an eviction. A worker that *raised* an
exception would probably raise it again, and so would the others. The job then fails, unless
--max-restarts allows a restart. If no worker has failed, the state of the job decides whether the
run is finished.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from shoal_common.exit_status import EVICTED, PREEMPTED

from shoal.launcher.processes.process import ExitStatus

ELASTIC_RESTARTS: Final = 3
"""Maximum number of replacements of an elastic worker that was killed by a signal or evicted, if
--max-restarts is not given."""


_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGKILL)


class Action(Enum):
    """Reaction of the launcher to the exit of a worker."""

    NONE = auto()
    """Do nothing: the other workers continue, or there are none."""
    REPLACE = auto()
    """Restart this worker as a new member."""
    RESTART_ALL = auto()
    """Stop the other workers, then restart all workers."""
    STOP = auto()
    """Stop the other workers, since the run cannot continue."""


class JobEnd(Enum):
    """A launcher's knowledge of whether and how a job has ended."""

    UNKNOWN = auto()
    """The coordinator could not be asked, or does not know the job. Running workers are not
    affected."""
    NONE = auto()
    """The job continues, or waits for workers."""
    COMPLETED = auto()
    """The script finished."""
    STOPPED = auto()
    """The job has been asked to stop (StopJob), and its script is finishing."""
    FAILED = auto()

    @property
    def is_over(self) -> bool:
        """True if the job has ended or is stopping, so that a new member would have no work."""
        return self in (JobEnd.COMPLETED, JobEnd.STOPPED, JobEnd.FAILED)


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """Record of a worker's exit."""

    index: int
    """Local rank of the worker: 0 .. workers-1."""
    rank: int
    """Last rank of the worker in the job, if known; otherwise `started_as`."""
    started_as: int
    """Rank that the worker was started with, shown before each line of its output."""
    pid: int
    status: ExitStatus
    host: str
    unix_s: float
    """Time at which the worker raised its exception or, if there is none, at which its process
    ended."""
    message: str = ""
    """Text of the uncaught exception, in one or more lines; empty if no exception was raised or
    recorded."""
    traceback: str = ""

    @property
    def who(self) -> str:
        """Human-readable name of the worker."""
        return f"rank {self.rank}" + (
            f" (output [{self.started_as}])" if self.rank != self.started_as else ""
        )

    @property
    def left(self) -> bool:
        """True if the worker succeeded, or was asked to leave and reported that it left. False if
        SIGTERM killed it."""
        return self.status.ok or (
            self.status.code == PREEMPTED and not self.status.signal and not self.message
        )

    @property
    def raised(self) -> bool:
        """True if the worker's script failed with an exception or its own exit code, regardless of
        how the process then ended. False if the worker was evicted."""
        return (
            not self.left
            and self.status.code != EVICTED
            and (bool(self.message) or not self.status.signal)
        )


class RestartPolicy:
    """Decides whether a launcher replaces a failed worker, restarts all workers, or stops."""

    def __init__(
        self,
        *,
        workers: int,
        max_restarts: int | None,
        fail_fast: bool = True,
        fail_on_stop: bool = False,
    ) -> None:
        """Creates the policy of a new run.

        Args:
            workers: number of processes.
            max_restarts: maximum number of restarts: in total for a plain script, per worker for
                elastic workers. None: 0, or ELASTIC_RESTARTS for elastic workers that did not raise
                an exception.
            fail_fast: True to end the job when an elastic worker has raised an exception.
            fail_on_stop: True if a run that was asked to stop is considered unfinished.
        """
        self.restarts = 0
        """Number of restarts of all workers so far."""
        self.elastic = False
        """True once a worker has joined the job. From then on, all workers of the run count as
        elastic."""
        self.end = JobEnd.UNKNOWN
        """Last known state of the job."""
        self.fatal: WorkerExit | None = None
        """First elastic worker that raised an exception and was not replaced; None if there is
        none."""
        self.survived: list[WorkerExit] = []
        """Failures that the run recovered from, through a replacement, a restart or other
        workers."""
        self.refused = ""
        """Reason why the job refuses this machine, on which no worker is then replaced; empty if
        the machine is not refused."""
        self._failures: list[WorkerExit] = []
        self._max_restarts = max_restarts
        self._fail_fast = fail_fast
        self._fail_on_stop = fail_on_stop
        self._replaced = [0] * workers
        self._stopping = False

    def replaced(self, index: int) -> int:
        """Returns the number of replacements of a worker so far."""
        return self._replaced[index]

    @property
    def failures(self) -> list[WorkerExit]:
        """Failures that the run did not recover from. Failures of scripts come before failures of
        processes; both are ordered by time."""
        return sorted(
            self._failures, key=lambda failure: (failure.status.code == EVICTED, failure.unix_s)
        )

    def started_all(self) -> None:
        """Records that all workers have been started or restarted."""
        self._outlive()
        self._stopping = False

    def stopping(self) -> None:
        """Records that the launcher has asked all workers to exit. From then on, `exited` returns
        `Action.NONE`."""
        self._stopping = True

    def joined(self) -> None:
        """Records that a worker has joined the job."""
        self.elastic = True

    def heard(self, end: JobEnd) -> None:
        """Records the state of the job as reported by the coordinator. An unknown state has no
        effect, and a job that has ended stays ended."""
        if end is not JobEnd.UNKNOWN and (end.is_over or not self.end.is_over):
            self.end = end

    def finished(self) -> None:
        """Records that a member has finished its script without having been asked to stop. The job
        is then completed, whether or not the coordinator knows this."""
        if not self.end.is_over:
            self.end = JobEnd.COMPLETED

    def exited(self, worker: WorkerExit, *, elastic: bool) -> Action:
        """Returns the reaction to the exit of a worker. `elastic`: True if the worker had joined
        the job."""
        self.elastic |= elastic
        if self._stopping:
            # Also reports workers that fail on their own while the others are being stopped.
            of_itself = bool(worker.message) or worker.status.signal not in _STOP_SIGNALS
            if self._failures and not worker.left and of_itself:
                self._failures.append(worker)
            return Action.NONE
        if worker.status.ok or (self.elastic and worker.left):
            self._outlive()
            return Action.NONE
        action = (
            self._after_elastic_failure(worker) if self.elastic else self._after_plain_failure()
        )
        # If other workers have finished the script, the death of a killed worker is harmless.
        made_up_for = action is Action.REPLACE or (
            self.elastic and self.end is JobEnd.COMPLETED and not worker.raised
        )
        (self.survived if made_up_for else self._failures).append(worker)
        self._stopping = action in (Action.RESTART_ALL, Action.STOP)
        return action

    def _outlive(self) -> None:
        """Records that the run has recovered from its failures, because a worker succeeded or all
        workers were restarted. Only `fatal` remains: the first failure of an elastic worker that
        raised an exception and was not replaced."""
        self.survived += [failure for failure in self._failures if failure is not self.fatal]
        self._failures = [self.fatal] if self.fatal is not None else []

    def _after_elastic_failure(self, worker: WorkerExit) -> Action:
        if self.refused:
            return Action.NONE
        allowed = self._max_restarts
        if allowed is None:
            allowed = 0 if worker.raised else ELASTIC_RESTARTS
        if not self.end.is_over and self._replaced[worker.index] < allowed:
            self._replaced[worker.index] += 1
            return Action.REPLACE
        if not worker.raised:
            return Action.NONE
        self.fatal = self.fatal or worker
        return Action.NONE if self.end.is_over or not self._fail_fast else Action.STOP

    def _after_plain_failure(self) -> Action:
        if self.restarts < (self._max_restarts or 0):
            self.restarts += 1
            return Action.RESTART_ALL
        return Action.STOP

    @property
    def fails_job(self) -> bool:
        """True if the failure `fatal` ends the job, so that the other launchers must be
        notified."""
        return self.fatal is not None and self._fail_fast

    @property
    def was_stopped(self) -> bool:
        """True if the job was asked to stop (StopJob), and no worker's failure ended it."""
        return self.elastic and self.end is JobEnd.STOPPED and self.fatal is None

    def exit_code(self, *, signal_number: int = 0) -> int:
        """Returns the exit code of the run after its last worker has exited. `signal_number`:
        signal that asked the launcher to exit; 0 if none did."""
        if self.fatal is not None:
            return self.fatal.status.code
        if self.refused and not self.end.is_over and not signal_number:
            return EVICTED
        if not self.elastic:
            return (
                128 + signal_number
                if signal_number
                else self.failures[0].status.code
                if self._failures
                else 0
            )
        if self.end is JobEnd.COMPLETED:
            return 0
        if self.end is JobEnd.STOPPED and not signal_number:
            return EVICTED if self._fail_on_stop else 0
        if self.end is JobEnd.FAILED:
            return 1
        if signal_number:
            return 128 + signal_number
        return self.failures[0].status.code if self._failures else EVICTED
