"""What a launcher does when a worker ends, and what its own exit status is: a pure state machine.
It is told of exits and answers with an action; no clock, no processes.

A plain script's workers are one whole, as under torchrun: one that fails takes the others with it,
and all are started anew or none.

Elastic workers (those that had joined the job) are replaced one by one, and the others go on
meanwhile, if what ended them may not happen again: a signal, or being put out. One that *raised*
would most likely raise again, and in the others too: unless --max-restarts allows for it, the job
has failed. What is known of the job decides whether a run that nobody's failure ended has come to
its end.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from shoal_common.exit_status import PREEMPTED, PUT_OUT

from shoal.launcher.process import ExitStatus

ELASTIC_RESTARTS: Final = 3
"""How often an elastic worker that a signal killed, or that was put out, is replaced where
--max-restarts was not given."""


_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGKILL)


class Action(Enum):
    """What to do about an exit."""

    NONE = auto()
    """Nothing: the others go on, or there are none."""
    REPLACE = auto()
    """Start this worker anew, as a new member."""
    RESTART_ALL = auto()
    """Stop the others, then start all anew."""
    STOP = auto()
    """Stop the others: the run cannot go on."""


class JobEnd(Enum):
    """How far a job has come, as far as its launcher knows."""

    UNKNOWN = auto()
    """The coordinator could not be asked, or has no such job. It says nothing about who lives."""
    NONE = auto()
    """It goes on, or waits for workers."""
    COMPLETED = auto()
    """Its script came to the end."""
    STOPPED = auto()
    """It was asked to stop (StopJob), and its script comes to the end."""
    FAILED = auto()

    @property
    def is_over(self) -> bool:
        """A new member would find nothing to do."""
        return self in (JobEnd.COMPLETED, JobEnd.STOPPED, JobEnd.FAILED)


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """The end of a worker process."""

    index: int
    """Number of the worker at its launcher: 0 .. workers-1."""
    rank: int
    """Its last rank in the job, as far as that is known; else `started_as`."""
    started_as: int
    """The rank that it was told at its start, and that its output has in front."""
    pid: int
    status: ExitStatus
    host: str
    unix_s: float
    """When it raised, else when its process had ended."""
    message: str = ""
    """The exception that it did not catch, in a line or more; empty: none, or it could not say
    so."""
    traceback: str = ""

    @property
    def who(self) -> str:
        """For people."""
        return f"rank {self.rank}" + (
            f" (output [{self.started_as}])" if self.rank != self.started_as else ""
        )

    @property
    def left(self) -> bool:
        """It ended well, or because it was asked to, and says so; not: SIGTERM killed it."""
        return self.status.ok or (
            self.status.code == PREEMPTED and not self.status.signal and not self.message
        )

    @property
    def raised(self) -> bool:
        """Its script failed, by an exception or an exit code of its own; whatever ended the process
        after that. Not: it was put out."""
        return (
            not self.left
            and self.status.code != PUT_OUT
            and (bool(self.message) or not self.status.signal)
        )


class RestartPolicy:
    """The state of one launcher's workers, as far as restarting is concerned."""

    def __init__(self, *, workers: int, max_restarts: int | None, fail_fast: bool = True) -> None:
        """For `workers` processes. `max_restarts` is of all together for a plain script, of each
        worker for an elastic one; None: 0, and ELASTIC_RESTARTS for elastic ones that did not
        raise. Without `fail_fast` the others go on when one has raised."""
        self.restarts = 0
        """Restarts of all workers so far."""
        self.elastic = False
        """A worker has joined the job: so are all, to the end of the run."""
        self.end = JobEnd.UNKNOWN
        """The last that was heard of the job."""
        self.fatal: WorkerExit | None = None
        """The first elastic worker that raised, and is not replaced."""
        self.survived: list[WorkerExit] = []
        """Failures that a replacement, a restart or other workers have made up for."""
        self._failures: list[WorkerExit] = []
        self._max_restarts = max_restarts
        self._fail_fast = fail_fast
        self._replaced = [0] * workers
        self._stopping = False

    def replaced(self, index: int) -> int:
        """How often this worker was replaced."""
        return self._replaced[index]

    @property
    def failures(self) -> list[WorkerExit]:
        """Those that nothing has made up for: what scripts did first, then what happened to
        workers, each in the order of time."""
        return sorted(
            self._failures, key=lambda failure: (failure.status.code == PUT_OUT, failure.unix_s)
        )

    def started_all(self) -> None:
        """All workers are started, at first or anew."""
        self._outlive()
        self._stopping = False

    def stopping(self) -> None:
        """The launcher has asked all workers to end: how they do it decides nothing any more."""
        self._stopping = True

    def joined(self) -> None:
        """A worker has joined the job."""
        self.elastic = True

    def heard(self, end: JobEnd) -> None:
        """What the coordinator says of the job. A job that is over does not begin again; not to
        know changes nothing."""
        if end is not JobEnd.UNKNOWN and (end.is_over or not self.end.is_over):
            self.end = end

    def finished(self) -> None:
        """A worker has come to the end of its script, as a member that nobody had asked to stop:
        the job is completed, whoever knows it."""
        if not self.end.is_over:
            self.end = JobEnd.COMPLETED

    def exited(self, worker: WorkerExit, *, elastic: bool) -> Action:
        """A worker has ended. `elastic`: it had joined the job."""
        self.elastic |= elastic
        if self._stopping:
            # Those that fail of themselves while the others are being stopped belong into the
            # account.
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
        # Once others have come to the end of the script, they have made up for one that is killed.
        made_up_for = action is Action.REPLACE or (
            self.elastic and self.end is JobEnd.COMPLETED and not worker.raised
        )
        (self.survived if made_up_for else self._failures).append(worker)
        self._stopping = action in (Action.RESTART_ALL, Action.STOP)
        return action

    def _outlive(self) -> None:
        """A worker succeeded, or all are started anew: but for the one that raised, and was an
        elastic one, that makes up for failures."""
        self.survived += [failure for failure in self._failures if failure is not self.fatal]
        self._failures = [self.fatal] if self.fatal is not None else []

    def _after_elastic_failure(self, worker: WorkerExit) -> Action:
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
        """The other launchers of the job have to know of `fatal`."""
        return self.fatal is not None and self._fail_fast

    def exit_code(self, *, signal_number: int = 0) -> int:
        """Returns the exit code of the run, after its last worker; `signal_number`: the launcher
        was asked to end by it, 0: it was not."""
        if self.fatal is not None:
            return self.fatal.status.code
        if not self.elastic:
            return (
                128 + signal_number
                if signal_number
                else self.failures[0].status.code
                if self._failures
                else 0
            )
        if self.end is JobEnd.COMPLETED or (self.end is JobEnd.STOPPED and not signal_number):
            return 0
        if self.end is JobEnd.FAILED:
            return 1
        if signal_number:
            return 128 + signal_number
        return self.failures[0].status.code if self._failures else PUT_OUT
