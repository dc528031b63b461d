"""Retries calls to one parameter server until they succeed or fail permanently.

Before each retry, a callback of the server's `ServerLink` determines the server's state. This
module does not depend on the purpose of the calls.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final, TypeVar

from shoal_common.backoff import Backoff
from shoal_common.errors import (
    CorruptDataError,
    DeadlineError,
    ShoalError,
    StaleGenerationError,
    UnavailableError,
)

from shoal_worker.parameter_servers.connection import Connection
from shoal_worker.parameter_servers.coordination.job import Job

_log = logging.getLogger(__name__)

_LONGEST_BACKOFF_S: Final = 1.0
_LEAVES_AFTER_S: Final = 5.0
"""Seconds after which a leaving worker stops waiting for an unreachable server. Its batch is then
assigned to another worker.
"""
TRANSIENT: Final = (UnavailableError, DeadlineError, CorruptDataError)
NOT_MY_TURN: Final = frozenset({"SSP_WAIT_TIMEOUT", "BSP_WAIT_TIMEOUT"})
_REWOUND: Final = frozenset(
    {"SEQUENCE_GAP", "BASE_VERSION_AHEAD", "PARTITION_UNINITIALIZED", "OPTIMIZER_UNCONFIGURED"}
)
"""Reasons of the errors that a server raises if it has lost data that it had acknowledged."""
_MOVED: Final = "STALE_SHARD_MAP"
"""Reason of the error that a server raises if partitions have moved since this worker read the
shard map."""
MOVING: Final = "PARTITION_MOVING"

AnswerT = TypeVar("AnswerT")


class Persistence:
    """Retries calls to one parameter server. May be used by only one thread at a time."""

    def __init__(
        self,
        job: Job,
        connection: Connection,
        *,
        patience: timedelta,
        closing: threading.Event,
        started: Callable[[], bool],
        resynchronize: Callable[[], None],
    ) -> None:
        """Prepares to retry calls.

        Args:
            patience: maximum time that the server may be unreachable.
            closing: event that is set to end all waits.
            started: returns whether all of this worker's tensors on the server have been
                initialized.
            resynchronize: determines the server's state; raises the errors of its calls, and
                ShardMapChanged.
        """
        self._job = job
        self._connection = connection
        self._patience = patience
        self._closing = closing
        self._started = started
        self._resynchronize = resynchronize

    def retry_until(self, method: str, attempt: Callable[[], AnswerT]) -> AnswerT:
        """Calls `attempt` until it succeeds. Determines the server's state before each retry.

        Raises:
            ShardMapChanged: partitions have moved.
            DeadlineError: the server was unreachable for longer than `server_timeout`.
            ShoalError: `attempt` failed in a way that a retry cannot fix.
        """
        server = self._connection
        with self._job.waits.of(f"parameter server {server.share.index} at {server.address}"):
            return self._retry_until(method, attempt)

    def _retry_until(self, method: str, attempt: Callable[[], AnswerT]) -> AnswerT:
        away_since: float | None = None
        backoff = Backoff(longest_s=_LONGEST_BACKOFF_S)
        while True:
            generation = self._job.generation
            try:
                if away_since is not None:
                    self._resynchronize()
                return attempt()
            except StaleGenerationError:
                # The job is on hold, or this member was evicted. The coordinator knows which.
                self._job.wait_for_rank(after=generation)
            except ShoalError as error:
                if self._closing.is_set() or not self._is_curable(error):
                    raise
                away_since = self._away(method, error, since=away_since)
                if error.reason == MOVING:
                    backoff.reset()  # a move takes a fraction of a second
                if self._job.leaving and time.monotonic() - away_since > _LEAVES_AFTER_S:
                    raise self._job.departure() from error
                self._closing.wait(backoff.next_s(error))

    def _is_curable(self, error: ShoalError) -> bool:
        if error.reason in NOT_MY_TURN or (
            error.reason == "PARTITION_UNINITIALIZED" and not self._started()
        ):
            return False
        return isinstance(error, TRANSIENT) or error.reason in _REWOUND or error.reason == _MOVED

    def _away(self, method: str, error: ShoalError, *, since: float | None) -> float:
        now, server = time.monotonic(), self._connection
        if since is None:
            level = logging.INFO if error.reason in (_MOVED, MOVING) else logging.WARNING
            _log.log(
                level,
                "server %d at %s: %s failed and will be retried: %s",
                server.share.index,
                server.address,
                method,
                error,
            )
            return now
        patience = self._patience.total_seconds()
        if now - since > patience:
            raise DeadlineError(
                f"parameter server {server.share.index} (last seen at {server.address}) was "
                f"unreachable for more than {patience:.0f} s (server_timeout). Start it again "
                "with its data directory, or restart the job. If it is running, and workers "
                "reach it at another address, start it with --advertise "
                f"(SHOAL_PS_SERVER_ADVERTISE). The last attempt failed: {error}",
                reason="SERVER_AWAY",
            ) from error
        return since

    def in_turn(self, method: str, attempt: Callable[[], AnswerT]) -> AnswerT:
        """Retries a call that may have to wait for other workers. Raises DeadlineError
        (NOT_MY_TURN) if this worker is asked to leave while it waits for its turn."""
        waiting_since = accused_at = time.monotonic()
        while True:
            try:
                return self.retry_until(method, attempt)
            except DeadlineError as error:
                if error.reason not in NOT_MY_TURN or self._job.leaving or self._closing.is_set():
                    raise
                now = time.monotonic()
                if now - accused_at > self._job.straggler_patience.total_seconds():
                    accused_at = now
                    _log.warning(
                        "waited %.0f s for a slower worker: %s", now - waiting_since, error
                    )
                    self._job.accuse_slowest(str(error))
