"""Ends a group on a device: aborts it, or finalizes it if all ranks leave, and waits until the
device is idle.

After an abort has been requested, kernels continue to read and write their tensors until the device
notices the abort. If these tensors were reused, or a new group formed, before that, later
computations would use results of an aborted collective. A group therefore ends in two phases.
First, any thread marks the group as ended, which takes effect immediately. Second, the thread that
raises the error, or forms the next group, waits here until the abort has returned and the device
has finished all queued operations. If that takes too long, or the device has failed, no later
result could be trusted and no new group would connect. The process then exits, and its launcher
replaces it. A separate thread enforces this time limit, because the issuing thread may be in CUDA,
waiting for a kernel that does not end.

torch has one mutex per communicator. An abort holds the mutex until NCCL has returned; a
finalization and a split hold it until all ranks have joined. `Work.is_completed()` takes the mutex
too (torch 2.11: NCCLComm::isAborted) while it holds the GIL. Called at such a time, it would block
all Python threads until NCCL returns, including heartbeats and this module's time limit. Therefore,
only this module queries works (`has_ended`): under a lock that is also held when the end begins,
and never after the end has begun.

If all ranks leave together, which their hosts agree on first, communicators are finalized instead:
NCCL closes its connections while all ranks are present. During that time, torch holds the locks
that an abort needs (2.13: ProcessGroupNCCL::shutdown, NCCLComm::waitReady, NCCLComm::destroy), so a
rank whose peer dies at that moment cannot be released. After a time limit, the rank abandons the
communicator. No operations are queued on it, so it keeps one of NCCL's threads and some memory, but
does not write to memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Final, NoReturn

from shoal_common.exit_status import EVICTED
from torch.distributed import Work

from shoal_worker.backends import native_threads
from shoal_worker.backends.base import GroupEndedError, cause_of
from shoal_worker.backends.nccl.device import Device, Native
from shoal_worker.backends.process_end import end_now

_log = logging.getLogger(__name__)

LIMIT: Final = timedelta(seconds=30)
"""Time limit for an abort, and for the kernels that are still running after it."""
FINALIZE_LIMIT: Final = timedelta(seconds=10)
"""Time limit of a finalization once all ranks leave."""


class Ending:
    """Ends one native group. Any thread may call `begin`; the thread that issues collectives calls
    `finalize` and `wait`."""

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
        """Additional time, in seconds, that an abort may currently take because torch holds a mutex
        that the abort needs.
        """
        self._finalize_limit_s = finalize_limit.total_seconds()
        self._end_process = end_process
        self._lock = threading.Lock()
        self._natives: list[Native] = []
        """Native groups to abort or finalize. The lock guards this list and the next two
        attributes."""
        self._began = False
        """True once an abort or a finalization has begun. Only one of the two ever begins."""
        self._splits = False
        """True while the library is splitting parts off the group."""
        self._over = threading.Event()
        """Set once nothing reads or writes the group's memory, or the device has failed."""
        self._failure: str | None = None
        """Reason why the device is unusable; None while it works."""

    def splits(self, at_most: timedelta) -> None:
        """Records that parts are being split off the group, until `has_split`. torch holds the
        mutex that an abort needs for up to `at_most`."""
        with self._lock:
            self._held_s, self._splits = at_most.total_seconds(), True

    def has_split(self) -> None:
        """Records that the split has ended and torch has released the mutex that an abort needs.
        Callable from any thread."""
        with self._lock:
            self._held_s, self._splits = 0.0, False

    def connects(self, at_most: timedelta) -> None:
        """Records that the group is connecting with a blocking communicator, until `has_connected`.
        The attempt cannot be interrupted for up to `at_most`."""
        with self._lock:
            self._held_s = at_most.total_seconds()

    def has_connected(self) -> None:
        """Records that the attempt to connect has ended. Callable from any thread."""
        with self._lock:
            self._held_s = 0.0

    def has_ended(self, work: Work) -> bool:
        """Returns whether a work has completed or failed, or the group has begun to end. Does not
        block. Callable from any thread. Raises RuntimeError for errors that the library has
        detected."""
        with self._lock:
            return self._began or (not self._splits and bool(work.is_completed()))

    def covers(self, native: Native) -> None:
        """Registers `native` once it has been created, so that it is aborted with the group, or
        immediately if the group has already begun to end."""
        with self._lock:
            self._natives.append(native)
            late = self._began
        if late:
            native_threads.start(native.abort, name="shoal-nccl-abort", most_s=self._limit_s)

    @property
    def native(self) -> Native | None:
        """The native group; None before it has been created."""
        with self._lock:
            return self._natives[-1] if self._natives else None

    def check_wanted(self, native: Native) -> None:
        """Aborts `native` if the group began to end while the blocking communicator was connecting,
        when torch had nothing to abort. Raises GroupEndedError once the abort has returned.
        """
        with self._lock:
            wanted = not self._began
        if not wanted:
            native.abort()
            raise GroupEndedError("the group was ended while it was connecting")

    def begin(self) -> None:
        """Starts aborting the group and returns immediately. Idempotent."""
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
        """Starts finalizing the group, as all ranks do at about the same time. No operations may be
        queued on the group. Returns immediately; `wait` blocks until the finalization is complete
        or has been abandoned. Does nothing if an abort has begun."""
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
        """Waits for at most `within` until the device has finished all queued operations of all
        groups. Returns whether it has.

        A group may be finalized only after that: a kernel that waits for a lost peer can be ended
        only by an abort, which is impossible after a finalization.
        """
        done = threading.Event()

        def look() -> None:
            with contextlib.suppress(RuntimeError):
                # a device that has failed does not count as idle; the end of the group reports the
                # failure
                self._device.synchronize()
                done.set()

        native_threads.start(look, name="shoal-nccl-rest", most_s=self._limit_s)
        return done.wait(within.total_seconds())

    def wait(self) -> None:
        """Blocks until the group's memory can be reused. Exits the process if the device has failed
        or does not become idle within the time limit."""
        self._keep_limit(self._limit_s + self._held_s)
        if self._failure is not None:
            self.failed(self._failure)

    def _keep_limit(self, limit_s: float) -> None:
        if not self._over.wait(limit_s):
            self._end_process(
                EVICTED,
                f"{self._device.where} was still busy {limit_s:g} s after a group on it had "
                f"ended, so its memory cannot be reused. This worker exits with status {EVICTED} "
                "for its launcher to restart it",
            )

    def failed(self, cause: str) -> NoReturn:
        """Exits the process because the device has failed."""
        self._end_process(
            EVICTED,
            f"{self._device.where} failed ({cause}). This worker exits with status {EVICTED} for "
            "its launcher to restart it",
        )

    def _finalize(self, natives: list[Native], done: threading.Event) -> None:
        for native in natives:
            try:
                native.shutdown()
            except RuntimeError as error:
                # The communicator may be half-destroyed, so it must not be aborted any more. Its
                # destructor would abort it, so it must not run either.
                native_threads.keep(native)
                _log.warning(
                    "could not shut down an NCCL group on %s in order: %s",
                    self._device.where,
                    cause_of(error),
                )
        done.set()

    def _finish(self, done: threading.Event) -> None:
        if not done.wait(self._finalize_limit_s):
            _log.warning(
                "abandoned an NCCL group on %s, which did not shut down within %g s, although "
                "all its ranks were leaving",
                self._device.where,
                self._finalize_limit_s,
            )
        self._rest()

    def _end(self, natives: list[Native]) -> None:
        for native in natives:
            try:
                native.abort()
            except RuntimeError as error:  # only the state of the device matters
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
