"""Writes checkpoints beside the training: one at a time, on a thread of its own.

The training thread calls every method; the job runs on the writer's thread and shares nothing with the training but what it was given.
`_lock` guards `_error`; all else is the training thread's own. The thread is no daemon: a process that ends normally finishes the
checkpoint under way first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from shoal_common.errors import DeadlineError

from shoal_worker.backends.inmemory.turns import run_aside

_log = logging.getLogger(__name__)


class CheckpointWriter:
    """At most one job is under way; the next waits for it.

    An error of a job is raised once, by the next call of any method, and logged at once.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._begun = 0.0
        """When the job under way did."""
        self._lock = threading.Lock()
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""
        return self._thread is not None and self._thread.is_alive()

    def done_within(self, timeout: timedelta) -> bool:
        """Waits for the job under way, but no longer than that. True: none is."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            # Aside: where ranks take turns, it may wait for what another rank writes.
            run_aside(lambda: thread.join(timeout.total_seconds()), f"until {thread.name} is done")
        return not self.busy

    def wait(self, timeout: timedelta) -> None:
        """Returns when no job is under way. To be called before the next copy is made, so that there is never more than one.

        Raises:
            DeadlineError: the job takes `timeout` longer; it goes on.
            Exception: what the last job raised.
        """
        if not self.done_within(timeout):
            assert self._thread is not None
            raise DeadlineError(
                f"{self._thread.name} is not done after {time.monotonic() - self._begun:.0f} s; is the disk too slow?",
                reason="CHECKPOINT_SLOW",
            )
        self._thread = None
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def submit(self, job: Callable[[], object], *, what: str, timeout: timedelta) -> None:
        """Starts `job` after the one under way. `what` names it in errors: "writing step-5 to ckpt/".

        Raises as `wait` does, without starting the job.
        """
        self.wait(timeout)
        self._thread, self._begun = threading.Thread(target=self._run, args=(job, what), name=what), time.monotonic()
        self._thread.start()

    def close(self, timeout: timedelta) -> None:
        """Waits for the job under way. Raises as `wait` does. The writer can be used again."""
        self.wait(timeout)

    def _run(self, job: Callable[[], object], what: str) -> None:
        try:
            job()
        except Exception as error:
            _log.error("%s failed: %s", what, error)
            with self._lock:
                self._error = error
