"""The CUDA device of this process and torch's ProcessGroupNCCL: this package calls CUDA and NCCL
only here.

torch gives each ProcessGroupNCCL a watchdog thread. By default, the watchdog terminates the process
on an error or a timeout, or sleeps for a minute while holding a lock that the next collective
needs. Shoal enforces the time limits itself. It disables the watchdog of its own groups with a
timeout that never expires, and with environment variables, which torch reads while it constructs a
group. Afterwards, the variables get their previous values back, so the watchdogs of a script's own
groups stay active. Comments beside each variable cite torch 2.13's source (ProcessGroupNCCL.cpp).
docs/gpu.md#torch-215-and-nccl2 compares the class with torch's newer one.

Communicators are non-blocking unless SHOAL_NCCL_BLOCKING is set: a blocking communicator cannot be
aborted until all ranks have connected, because torch has no handle to it before then. The setting
exists because torch itself has used blocking communicators by default since 2.7.1 (pytorch#153960),
so non-blocking ones are rarely used.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Final, Protocol

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError, DeadlineError
from torch.distributed import AllreduceOptions, DebugLevel, Work, get_debug_level
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal_worker.settings import TemporaryEnvironment, WorkerSettings, force_environment
from shoal_worker.torch_internals import expected_versions

_log = logging.getLogger(__name__)

WATCHDOG: Final = {
    # The watchdog's action after an error or a timeout. 0: none; 3, the default: terminate the
    # process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Otherwise, waits would block in C++, where an abort could not end them without the watchdog.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # Would set the first variable back to 3, and write each collective into the store.
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    # A second thread would terminate the process when the watchdog stalls, or when a rank requests
    # a dump from all ranks.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # After an error, the watchdog would sleep for four times this duration, holding the lock that
    # the next collective needs.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # An error of one group must not affect all groups, and CUDA errors are detected by the waits.
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # From 2.15 on, would terminate the process after a timeout although the previous one is 0.
    "TORCH_NCCL_TEARDOWN_ON_TIMEOUT": "0",
}
"""Variables that ProcessGroupNCCL reads while a group is constructed, with the values for Shoal's
groups."""
QUIET: Final = {
    # At the first message, would log a warning that torch runs messages in the order of the group's
    # collectives. Shoal's schedules take this into account.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""Variables that silence warnings that users cannot act on. Also read during construction."""
READ_LATER: Final = {
    # An abort of one group would make another group's heartbeat monitor terminate the process.
    "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "0",
}
"""Variables that ProcessGroupNCCL reads whenever it needs them. They keep these values, for all
groups of the process."""
_CONSTRUCTING: Final = TemporaryEnvironment({**WATCHDOG, **QUIET})
reporting: Final = threading.Lock()
"""Acquired, for good, by the thread that reports which variables were overridden."""
_OF_LAUNCHERS: Final = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
"""Variable and value that torchrun, and `shoal run` for plain scripts, set for all workers."""
_NEVER: Final = timedelta(days=3650)
"""A timeout that never expires. torch counts it in nanoseconds, which overflow after 292 years."""
_LOOK_S: Final = 0.002
_SPLITS: Final = (2, 18, 0)
"""First version of NCCL that has ncclCommSplit."""
USED: Final = (
    *("abort", "allreduce", "eager_connect_single_device", "get_runtime_nccl_version", "shutdown"),
    *("NCCLConfig.blocking", "Options._timeout", "Options.config"),
)
"""Attributes of ProcessGroupNCCL that Shoal cannot do without."""


class Native(Protocol):
    """Part of ProcessGroupNCCL's interface that is needed to abort or finalize a group."""

    def abort(self) -> None:
        """Aborts the group's kernels and blocks until they have ended. If called while the group is
        connecting, blocks until that attempt has been abandoned."""
        ...

    def shutdown(self) -> None:
        """Finalizes and destroys the communicator, and waits until all ranks do so. This wait
        cannot be interrupted, and `abort` must not be called afterwards."""
        ...


@dataclass(frozen=True, kw_only=True)
class Split:
    """Part number `part` of the group `whole`, which is being divided into parts. All ranks of
    `whole` must split it at the same time."""

    whole: Native
    part: int


class Life(Protocol):
    """Part of the interface of `ending.Ending` that a device needs while it connects a native
    group."""

    def covers(self, native: Native) -> None:
        """Registers a native group as soon as it has been created, so that `Ending.begin` can abort
        it."""
        ...

    def check_wanted(self, native: Native) -> None:
        """Aborts `native` and raises GroupEndedError if the group began to end while `native` was
        connecting."""
        ...

    def has_ended(self, work: Work) -> bool:
        """Returns whether a work has completed or failed, or the group has begun to end. Does not
        block."""
        ...


class Device(Protocol):
    """A device that runs queued collectives while the host continues."""

    @property
    def kind(self) -> str:
        """torch's name of the device type."""
        ...

    @property
    def where(self) -> str:
        """Name of the device in messages: `cuda:0`."""
        ...

    def identity(self) -> str:
        """Returns the identity of the device, which is the same for two processes if and only if
        they use the same device."""
        ...

    @property
    def splits(self) -> bool:
        """True if new groups should be split off existing ones and the library supports that. All
        ranks with the same environment get the same result."""
        ...

    @property
    def blocks(self) -> bool:
        """True if `connect` cannot be interrupted before all ranks have connected."""
        ...

    def connect(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        life: Life,
        split: Split | None = None,
    ) -> dist.ProcessGroup:
        """Connects a native group; blocks. With `split`, the attempt cannot be aborted until
        `timeout`.

        Raises DeadlineError or RuntimeError if a rank does not connect within `timeout`, and
        RuntimeError for the library's errors.
        """
        ...

    def synchronize(self) -> None:
        """Blocks until all queued operations have finished. Raises RuntimeError if the device has
        failed."""
        ...

    def has_failed(self, error: RuntimeError) -> bool:
        """Returns whether `error` means that this process can no longer use the device. Does not
        block."""
        ...


class CudaDevice:
    """Implements `Device` for the calling thread's current CUDA device (torch.cuda.set_device)."""

    kind: ClassVar[str] = "cuda"

    def __init__(self) -> None:
        """Raises ConfigurationError if torch has no CUDA, no NCCL, or no class ProcessGroupNCCL."""
        library()
        if not torch.cuda.is_available():
            raise ConfigurationError(
                "backend='nccl': found no CUDA device; check the driver and "
                "CUDA_VISIBLE_DEVICES, or use backend='gloo'"
            )
        self.device = self._current()

    @property
    def where(self) -> str:
        """Name of the device in messages; see `Device`."""
        return str(self.device)

    def identity(self) -> str:
        """Implements `Device.identity` with the UUID that the driver assigns to the device, or to
        its slice."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    @property
    def splits(self) -> bool:
        """True if communicators can be split; see `Device`. This needs NCCL 2.18, and a torch that
        has a private attribute for splitting."""
        return (
            WorkerSettings.load().nccl_split
            and self._library().get_runtime_nccl_version() >= _SPLITS
            and hasattr(self._library().Options, "split_from")
        )

    @property
    def blocks(self) -> bool:
        """True if connecting blocks; see `Device`."""
        return WorkerSettings.load().nccl_blocking

    def connect(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        life: Life,
        split: Split | None = None,
    ) -> dist.ProcessGroup:
        """Implements `Device.connect`."""
        deadline = time.monotonic() + timeout.total_seconds()
        library = self._library()
        options = library.Options()
        options._timeout = _NEVER
        options.config.blocking = int(self.blocks)
        if split is not None:
            options.split_from, options.split_color = split.whole, split.part
        with watchdog_disabled(timeout):
            native = library(PrefixStore("nccl", store), rank, size, options)
        life.covers(native)
        native.eager_connect_single_device(self.device)
        if self.blocks:
            life.check_wanted(native)
        # The first collective waits, in C++, until the communicator is ready. An unused
        # communicator never reports that it is ready.
        ready = torch.zeros(1, device=self.device)
        work = native.allreduce([ready], AllreduceOptions())
        while not life.has_ended(work):
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the first collective of {size} ranks with NCCL took longer than "
                    f"{timeout.total_seconds():g} s",
                    reason="CONNECT_TIMEOUT",
                )
            time.sleep(_LOOK_S)
        work.wait()
        return self._grouped(native, store, rank, size)

    def synchronize(self) -> None:
        """Implements `Device.synchronize`."""
        torch.cuda.synchronize(self.device)

    def has_failed(self, error: RuntimeError) -> bool:
        """Implements `Device.has_failed`. After a permanent failure, every later call raises the
        error. Other errors, such as a failed kernel launch, do not recur."""
        if not isinstance(error, torch.AcceleratorError | dist.DistError):
            # for a DistError, NCCL has detected the failure
            return False
        try:
            torch.cuda.current_stream(self.device).query()
        except RuntimeError:
            return True
        return False

    def _library(self) -> Any:
        return library()

    def _current(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def _grouped(self, native: Any, store: Store, rank: int, size: int) -> dist.ProcessGroup:
        group = dist.ProcessGroup(PrefixStore("nccl-group", store), rank, size)
        kind = dist.ProcessGroup.BackendType.NCCL
        group._set_default_backend(kind)
        group._register_backend(self.device, kind, native)
        return group


def library() -> Any:
    """Returns the class ProcessGroupNCCL, which builds of torch without CUDA lack.

    Raises:
        ConfigurationError: torch has no NCCL, or the class lacks something that Shoal uses.
    """
    found = getattr(c10d, "ProcessGroupNCCL", None)
    dropped = found is None and hasattr(c10d, "ProcessGroupNCCL2")
    if not (dropped or dist.is_nccl_available()):
        raise ConfigurationError(
            "backend='nccl': this build of torch lacks NCCL; install a CUDA build, or use "
            "backend='gloo'"
        )
    missing = [f".{name}" for name in USED if not _has(found, name)] if found else [""]
    if missing:
        raise ConfigurationError(
            f"backend='nccl': torch {torch.__version__} has no "
            f"{', '.join(f'ProcessGroupNCCL{name}' for name in missing)}, which Shoal's groups "
            f"need. Install torch {expected_versions()}, or use backend='gloo'"
        )
    return found


def _has(found: Any, name: str) -> bool:
    try:
        operator.attrgetter(name)(found)
    except AttributeError:
        return False
    return True


@contextlib.contextmanager
def watchdog_disabled(connect_timeout: timedelta) -> Iterator[None]:
    """Disables the watchdog of a ProcessGroupNCCL that is constructed in the context and limits its
    time to connect, overriding the user's values. This also applies to a group that another thread
    of the script constructs at the same moment.

    Raises:
        ConfigurationError: TORCH_DISTRIBUTED_DEBUG, which torch reads at import, is DETAIL.
    """
    if get_debug_level() == DebugLevel.DETAIL:
        raise ConfigurationError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL with backend='nccl': torch's watchdog would end this "
            "process when a peer is lost, so Shoal could not continue without that peer. Set it "
            "to INFO or OFF before the process starts",
            reason="DEBUG_LEVEL_DETAIL",
        )
    # For a non-blocking communicator: time limit of its first use, and of an abort that waits for
    # that use. Read once in a process.
    waits = {
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(max(1, math.ceil(connect_timeout.total_seconds())))
    }
    kept = force_environment({**READ_LATER, **waits})
    with _CONSTRUCTING.set() as overridden:
        _report({**kept, **overridden})
        yield


def _report(overridden: dict[str, str]) -> None:
    """Logs the user's values that were overridden, for the first group of the process."""
    if overridden.get(_OF_LAUNCHERS[0]) == _OF_LAUNCHERS[1]:  # users do not set this
        del overridden[_OF_LAUNCHERS[0]]
    loud = sorted(overridden.keys() - QUIET.keys())
    if reporting.acquire(blocking=False) and loud:
        _log.warning(
            "%s was overridden: Shoal enforces the timeouts of collectives itself, and torch's "
            "watchdog must not end the process because of Shoal's groups",
            ", ".join(f"{name}={overridden[name]}" for name in loud),
        )
