"""What a launcher does when a worker ends: a pure state machine. It is told of exits and answers with an action; no clock, no processes.

A plain script's workers are one whole, as under torchrun: one that fails takes the others with it, and all are started anew or none.
Elastic workers (those that had joined the job) are replaced one by one, and the others go on meanwhile.

A run has failed when a failure came after the last worker that succeeded: what the others outlived and finished without is no failure of
the run.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from shoal.launcher.process import ExitStatus

ELASTIC_RESTARTS: Final = 3
"""How often an elastic worker that a signal killed is replaced where --max-restarts was not given. One that raised is not: most
likely it would again."""


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


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """The end of a worker process."""

    index: int
    """Of its launcher: 0 .. workers-1."""
    rank: int
    """As it was told at its start."""
    pid: int
    status: ExitStatus
    host: str
    unix_s: float
    message: str = ""
    """The script's own account (torchrun's error file), if it left one."""


class RestartPolicy:
    """The state of one launcher's workers, as far as restarting is concerned."""

    def __init__(self, *, workers: int, max_restarts: int | None) -> None:
        """For `workers` processes. `max_restarts` is of all together for a plain script, of each worker for an elastic one; None: 0 for
        the former, ELASTIC_RESTARTS for the latter."""
        self.restarts = 0
        """Restarts of all workers so far."""
        self.failures: list[WorkerExit] = []
        """Failures since the last worker that succeeded and the last start of all, first one first."""
        self.survived: list[WorkerExit] = []
        """The failures before those."""
        self._max_restarts = max_restarts
        self._replaced = [0] * workers
        self._elastic = False
        self._stopping = False

    def replaced(self, index: int) -> int:
        """How often this worker was replaced."""
        return self._replaced[index]

    def started_all(self) -> None:
        """All workers are started, at first or anew."""
        self._outlive()
        self._stopping = False

    def stopping(self) -> None:
        """The launcher has asked all workers to end: how they do it decides nothing any more."""
        self._stopping = True

    def exited(self, worker: WorkerExit, *, elastic: bool, over: bool = False) -> Action:
        """A worker has ended.

        Args:
            elastic: it had joined the job.
            over: the job is finished or stops, so that a new member would find nothing to do.
        """
        self._elastic |= elastic
        if self._stopping:
            # Those that fail of themselves while the others are being stopped belong into the account.
            if self.failures and not worker.status.ok and worker.status.signal not in _STOP_SIGNALS:
                self.failures.append(worker)
            return Action.NONE
        if worker.status.ok:
            self._outlive()
            return Action.NONE
        self.failures.append(worker)
        action = self._after_elastic_failure(worker, over) if self._elastic else self._after_plain_failure()
        self._stopping = action in (Action.RESTART_ALL, Action.STOP)
        return action

    def _outlive(self) -> None:
        self.survived += self.failures
        self.failures = []

    def _after_elastic_failure(self, worker: WorkerExit, over: bool) -> Action:
        if over:
            return Action.NONE
        allowed = self._max_restarts
        if allowed is None:
            allowed = ELASTIC_RESTARTS if worker.status.signal else 0
        if self._replaced[worker.index] < allowed:
            self._replaced[worker.index] += 1
            return Action.REPLACE
        return Action.NONE

    def _after_plain_failure(self) -> Action:
        if self.restarts < (self._max_restarts or 0):
            self.restarts += 1
            return Action.RESTART_ALL
        return Action.STOP

    @property
    def exit_code(self) -> int:
        """0, or that of the first worker whose failure was not outlived."""
        return self.failures[0].status.code if self.failures else 0
