"""The end of a group on a device: an abort, or where all ranks leave a finalization, and then a
device that is at rest.

An abort that was asked for has not ended anything yet: kernels go on reading and writing their
tensors until the device has seen it. Who gave those tensors to something else, or made a new group
beside the old abort, would compute with what a dead collective writes. So a group ends in two
phases. It is marked ended, at once, from any thread; and what raises for that, or makes the next
group, waits here until the abort has returned and everything that was queued on the device has
ended. Where that takes too long, or the device has failed, no later result could be trusted and no
new group would connect: the process ends, and its launcher replaces it. A thread of its own keeps
that time: the thread that issues collectives may be in CUDA meanwhile, behind the kernel that does
not end.

torch keeps one mutex for each communicator. An abort holds it until NCCL has returned; a
finalization and a split hold it until all ranks have come. `Work.is_completed()` takes it too
(torch 2.11: NCCLComm::isAborted) and keeps the GIL. Called meanwhile, it would stop all threads of
Python for as long as NCCL takes, heartbeats and the clock of this module included. So works are
asked here alone (`has_ended`), under the lock under which an end begins, and never afterwards.

Where all ranks leave at once, after a word between their hosts, communicators are finalized
instead: NCCL closes what it has opened while all ranks are there. torch holds, while it waits for
that, the locks that an abort needs (2.13: ProcessGroupNCCL::shutdown, NCCLComm::waitReady,
NCCLComm::destroy), so a rank whose peer dies in that moment cannot be freed. It gives the
communicator up after a while: nothing is queued on it, so it holds a thread and memory of NCCL's,
and writes into nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Final, NoReturn

from shoal_common.exit_status import PUT_OUT
from torch.distributed import Work

from shoal_worker.backends import native_threads
from shoal_worker.backends.base import GroupEndedError, cause_of
from shoal_worker.backends.nccl.device import Device, Native
from shoal_worker.backends.process_end import end_now

_log = logging.getLogger(__name__)

LIMIT: Final = timedelta(seconds=30)
"""Time for which an abort may take, and the kernels after it."""
FINALIZE_LIMIT: Final = timedelta(seconds=10)
"""Time for which a finalization may take once all ranks leave."""


class Ending:
    """The end of one native group, which may have begun or not. `begin` is for any thread,
    `finalize` and `wait` for the one that issues collectives."""

    def __init__(
        self,
        device: Device,
        *,
        limit: timedelta = LIMIT,
        finalize_limit: timedelta = FINALIZE_LIMIT,
        end_process: Callable[[int, str], NoReturn] = end_now,
    ) -> None:
        self._device = device
        self._limit_s = limit.total_seconds()
        self._held_s = 0.0
        """Additional time that an abort may take now."""
        self._finalize_limit_s = finalize_limit.total_seconds()
        self._end_process = end_process
        self._lock = threading.Lock()
        self._natives: list[Native] = []
        """Groups to be aborted, or finalized. Guarded by the lock, like the next two."""
        self._began = False
        """One of the two has begun, and so the other does not."""
        self._splits = False
        """The library splits parts off the group."""
        self._over = threading.Event()
        """Nothing reads or writes the group's memory any more, or the device has failed."""
        self._failure: str | None = None
        """Reason why the device cannot be used any more."""

    def splits(self, at_most: timedelta) -> None:
        """Notes that parts are split off the group, until `has_split`.

        torch holds the mutex that an abort needs, for `at_most` that long.
        """
        with self._lock:
            self._held_s, self._splits = at_most.total_seconds(), True

    def has_split(self) -> None:
        """Notes that the library has released that mutex. Any thread."""
        with self._lock:
            self._held_s, self._splits = 0.0, False

    def connects(self, at_most: timedelta) -> None:
        """Notes that the group connects with a communicator that blocks, until `has_connected`.

        Nothing frees it, for `at_most` that long.
        """
        with self._lock:
            self._held_s = at_most.total_seconds()

    def has_connected(self) -> None:
        """Notes that the attempt has ended. Any thread."""
        with self._lock:
            self._held_s = 0.0

    def has_ended(self, work: Work) -> bool:
        """Returns whether a work has completed or failed, or the group's end has begun.

        Does not block. Any thread. Raises RuntimeError for what the library has noticed.
        """
        with self._lock:
            return self._began or (not self._splits and bool(work.is_completed()))

    def covers(self, native: Native) -> None:
        """`native` has been made: the end aborts it, at once if it has begun."""
        with self._lock:
            self._natives.append(native)
            late = self._began
        if late:
            native_threads.start(native.abort, name="shoal-nccl-abort", most_s=self._limit_s)

    @property
    def native(self) -> Native | None:
        """The group itself, once it has been made."""
        with self._lock:
            return self._natives[-1] if self._natives else None

    def check_wanted(self, native: Native) -> None:
        """Aborts `native`, whose communicator blocked and has connected, if the end has begun.

        torch had nothing to abort before. Raises GroupEndedError once the abort has returned.
        """
        with self._lock:
            wanted = not self._began
        if not wanted:
            native.abort()
            raise GroupEndedError("the group was ended while it connected")

    def begin(self) -> None:
        """Aborts the group and returns at once. Idempotent."""
        with self._lock:
            if self._began:
                return
            self._began = True
            natives, limit_s = list(self._natives), self._limit_s + self._held_s
        native_threads.start(lambda: self._end(natives), name="shoal-nccl-abort", most_s=limit_s)
        native_threads.start(
            lambda: self._keep_limit(limit_s), name="shoal-nccl-limit", most_s=limit_s
        )

    def finalize(self) -> None:
        """Finalizes the group, on which nothing is queued, as all ranks do at about the same time.
        Returns at once; `wait` waits for it, or until it was given up. Does nothing where an abort
        has begun."""
        with self._lock:
            if self._began:
                return
            self._began = True
            natives = list(self._natives)
        done = threading.Event()
        native_threads.start(
            lambda: self._finalize(natives, done),
            name="shoal-nccl-finalize",
            most_s=self._finalize_limit_s,
        )
        native_threads.start(
            lambda: self._finish(done), name="shoal-nccl-finish", most_s=self._limit_s
        )

    def at_rest(self, within: timedelta) -> bool:
        """Returns whether the device has done all that was queued on it, by any group, within that
        time. Only then may a group be finalized: what a kernel waits for that never comes only an
        abort ends, and no abort can follow a finalization."""
        done = threading.Event()

        def look() -> None:
            with contextlib.suppress(RuntimeError):
                # a device that has failed is not at rest; the end of the group says so
                self._device.synchronize()
                done.set()

        native_threads.start(look, name="shoal-nccl-rest", most_s=self._limit_s)
        return done.wait(within.total_seconds())

    def wait(self) -> None:
        """Returns when the group's memory can be used for something else. Ends the process if the
        device has failed, or does not come to rest within the limit."""
        self._keep_limit(self._limit_s + self._held_s)
        if self._failure is not None:
            self.failed(self._failure)

    def _keep_limit(self, limit_s: float) -> None:
        if not self._over.wait(limit_s):
            self._end_process(
                PUT_OUT,
                f"{self._device.where} did not come to rest within {limit_s:g} s after a group on "
                "it had ended, so its memory cannot be used again: this worker ends with status "
                f"{PUT_OUT}, for its launcher to start it anew",
            )

    def failed(self, cause: str) -> NoReturn:
        """Ends the process, for the device has failed."""
        self._end_process(
            PUT_OUT,
            f"{self._device.where} has failed ({cause}): this worker ends with status {PUT_OUT}, "
            "for its launcher to start it anew",
        )

    def _finalize(self, natives: list[Native], done: threading.Event) -> None:
        for native in natives:
            try:
                native.shutdown()
            except RuntimeError as error:
                # No abort follows, since the communicator may be half destroyed; nor does the
                # destructor, which would abort it.
                native_threads.keep(native)
                _log.warning(
                    "a group on %s could not be finalized: %s", self._device.where, cause_of(error)
                )
        done.set()

    def _finish(self, done: threading.Event) -> None:
        if not done.wait(self._finalize_limit_s):
            _log.warning(
                "a group on %s was not finalized within %g s, though all its ranks had said that "
                "they leave: it is given up",
                self._device.where,
                self._finalize_limit_s,
            )
        self._rest()

    def _end(self, natives: list[Native]) -> None:
        for native in natives:
            try:
                native.abort()
            except RuntimeError as error:  # what counts is whether the device comes to rest
                if self._device.has_failed(error):
                    self._failure = cause_of(error)
        self._rest()

    def _rest(self) -> None:
        try:
            if self._failure is None:
                self._device.synchronize()
        except RuntimeError as error:
            self._failure = cause_of(error)
        self._over.set()
