"""The CUDA device of this process, and torch's ProcessGroupNCCL on it: all that this package asks
of either.

torch gives that class a watchdog of its own, a thread for each group. Left as it is it ends the
process on an error or a timeout, or sleeps for a minute with a lock that the next collective needs.
Shoal keeps the time itself, so the watchdog is told to look and do nothing: by environment
variables, which it reads when a group is made, and by a timeout that never comes. What can be read
in torch 2.13's sources (ProcessGroupNCCL.cpp) stands beside each variable.

Communicators do not block, unless SHOAL_NCCL_BLOCKING is set: one that blocks cannot be aborted
until all ranks have come, since torch has no handle of it before. torch itself uses communicators
that block by default since 2.7.1 (pytorch#153960), so most of its users never see the others; hence
the setting.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Final, Protocol

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError, DeadlineError
from torch.distributed import AllreduceOptions, DebugLevel, Work, get_debug_level
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal_worker.settings import WorkerSettings, force_environment

_log = logging.getLogger(__name__)

WATCHDOG: Final = {
    # What the watchdog does about an error or a timeout: 0 is nothing; 3, the default, ends the
    # process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Waits that block in C++, and no watchdog: an abort could not free them.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # Sets the first of these back to 3, and writes each collective into the store.
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    # A second thread that ends the process when the watchdog stands still, or when a rank asks all
    # for a dump.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "0",
    # After an error the watchdog sleeps four times as long, and holds the lock that the next
    # collective needs.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # An error of one group is none of all, and one of CUDA is found where it is waited for.
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
"""Variables that ProcessGroupNCCL reads when it is made, with what they have to be."""
QUIET: Final = {
    # A warning at the first message: torch runs messages in the order of the group's collectives,
    # which Shoal's schedules allow for.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""Variables that silence warnings about what users cannot change."""
_OF_LAUNCHERS: Final = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
"""Variables that torchrun, and `shoal run` for plain scripts, set for all workers."""
_NEVER: Final = timedelta(days=3650)
"""A timeout that does not come. torch counts nanoseconds from it, which end after 292 years."""
_LOOK_S: Final = 0.002
_SPLITS: Final = (2, 18, 0)
"""The first version of NCCL with ncclCommSplit."""


class Native(Protocol):
    """The native object to be ended: a ProcessGroupNCCL."""

    def abort(self) -> None:
        """Ends its kernels, and returns when they have ended. May be called while it connects;
        blocks then until it has given up."""
        ...

    def shutdown(self) -> None:
        """Finalizes and destroys the communicator, which waits for all ranks to do so; nothing can
        free it, and no abort may follow."""
        ...


@dataclass(frozen=True, kw_only=True)
class Split:
    """The group that a new one is split off, and the number of the new one. All ranks of `whole`
    split at once."""

    whole: Native
    part: int


class Life(Protocol):
    """The life of the native group that a device connects (`ending.Ending`)."""

    def covers(self, native: Native) -> None:
        """Takes what the group's end aborts, as soon as it has been made."""
        ...

    def check_wanted(self, native: Native) -> None:
        """Aborts a group that has connected after its end had begun, and raises GroupEndedError
        then."""
        ...

    def has_ended(self, work: Work) -> bool:
        """Returns whether a work has completed or failed, or the group's end has begun. Does not
        block."""
        ...


class Device(Protocol):
    """A device on which collectives are queued: the host goes on before they have run."""

    @property
    def kind(self) -> str:
        """torch's name of its type."""
        ...

    @property
    def where(self) -> str:
        """Name of the device in messages: `cuda:0`."""
        ...

    def identity(self) -> str:
        """The same for two processes if and only if they use one device."""
        ...

    @property
    def splits(self) -> bool:
        """True if groups are to be split off others, and the library can; the same for all ranks
        with one environment."""
        ...

    @property
    def blocks(self) -> bool:
        """True if nothing frees `connect` before all ranks have come."""
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
        """Connects a group of its own to that of all ranks; blocks.

        While it is split off another, that one cannot be aborted, for as long as `timeout` says.

        Raises DeadlineError or RuntimeError when a rank does not come within `timeout`, and
        RuntimeError for what the library says.
        """
        ...

    def synchronize(self) -> None:
        """Blocks until all that was queued has ended. Raises RuntimeError when the device has
        failed."""
        ...

    def has_failed(self, error: RuntimeError) -> bool:
        """Returns whether `error` says that the device can do nothing more in this process. Does
        not block."""
        ...


class CudaDevice:
    """The calling thread's current CUDA device: torch.cuda.set_device comes first. A `Device`."""

    kind: ClassVar[str] = "cuda"

    def __init__(self) -> None:
        """Raises ConfigurationError where torch has no CUDA or no NCCL."""
        if not dist.is_nccl_available():
            raise ConfigurationError(
                "backend='nccl': this torch is built without NCCL; install a CUDA build, or use "
                "backend='gloo'"
            )
        if not torch.cuda.is_available():
            raise ConfigurationError(
                "backend='nccl': no CUDA device; check the driver and CUDA_VISIBLE_DEVICES, or use "
                "backend='gloo'"
            )
        self.device = self._current()

    @property
    def where(self) -> str:
        """Name of the device in messages; see `Device`."""
        return str(self.device)

    def identity(self) -> str:
        """Implements `Device.identity`: the UUID that the driver gives it, or its slice."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    @property
    def splits(self) -> bool:
        """True if communicators can be split; see `Device`. NCCL supports it since 2.18, and torch
        names a private attribute for it."""
        return (
            WorkerSettings().nccl_split
            and self._library().get_runtime_nccl_version() >= _SPLITS
            and hasattr(self._library().Options, "split_from")
        )

    @property
    def blocks(self) -> bool:
        """True if connecting blocks; see `Device`."""
        return WorkerSettings().nccl_blocking

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
        keep_watchdog_still(timeout)
        deadline = time.monotonic() + timeout.total_seconds()
        library = self._library()
        options = library.Options()
        options._timeout = _NEVER
        options.config.blocking = int(self.blocks)
        if split is not None:
            options.split_from, options.split_color = split.whole, split.part
        native = library(PrefixStore("nccl", store), rank, size, options)
        life.covers(native)
        native.eager_connect_single_device(self.device)
        if self.blocks:
            life.check_wanted(native)
        # The first collective waits, in C++, until the communicator stands; a communicator that is
        # asked for nothing never says so.
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
        """Implements `Device.has_failed`. An error that stays is given by every later call; others,
        as of a kernel that could not be launched, are not."""
        if not isinstance(error, torch.AcceleratorError | dist.DistError):
            # the other: NCCL has met it
            return False
        try:
            torch.cuda.current_stream(self.device).query()
        except RuntimeError:
            return True
        return False

    def _library(self) -> Any:
        """The class ProcessGroupNCCL, which builds of torch without CUDA lack."""
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        return ProcessGroupNCCL

    def _current(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def _grouped(self, native: Any, store: Store, rank: int, size: int) -> dist.ProcessGroup:
        group = dist.ProcessGroup(PrefixStore("nccl-group", store), rank, size)
        kind = dist.ProcessGroup.BackendType.NCCL
        group._set_default_backend(kind)
        group._register_backend(self.device, kind, native)
        return group


def keep_watchdog_still(connect_timeout: timedelta) -> None:
    """Sets what ProcessGroupNCCL reads from the environment when it is made, whatever the user has
    set.

    Raises:
        ConfigurationError: TORCH_DISTRIBUTED_DEBUG is DETAIL, which torch has read when it was
            imported.
    """
    if get_debug_level() == DebugLevel.DETAIL:
        raise ConfigurationError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL with backend='nccl': torch's watchdog then ends the "
            "process when a peer is lost, and Shoal could not go on without that peer. Set it to "
            "INFO or OFF before the process starts",
            reason="DEBUG_LEVEL_DETAIL",
        )
    force_environment(QUIET)
    # Of a communicator that does not block: how long its first use waits for it, and an abort for
    # that. Read once in a process.
    waits = {
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(max(1, math.ceil(connect_timeout.total_seconds())))
    }
    overruled = dict(force_environment({**WATCHDOG, **waits}))
    if overruled.get(_OF_LAUNCHERS[0]) == _OF_LAUNCHERS[1]:  # no user has set that
        del overruled[_OF_LAUNCHERS[0]]
    if overruled:
        given = ", ".join(f"{name}={value}" for name, value in sorted(overruled.items()))
        _log.warning(
            "%s is overruled: Shoal keeps the time of collectives, and torch's watchdog must not "
            "end the process",
            given,
        )
