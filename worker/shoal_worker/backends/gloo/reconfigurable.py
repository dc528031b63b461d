"""Groups whose ranks can change, for torch's experimental `_reconfigure` (torch 2.14 and later).

`init_process_group("shoal_gloo", enable_reconfigure=True)` creates a `ReconfigurableGroup` without
connections. Each `_reconfigure` aborts the previous group of ranks (interruptible.py), waits until
Gloo has stopped using that group's tensors, and connects the ranks whose handles it receives. With
torch's own Gloo, pending collectives would stay pending, and would write to their tensors when a
suspended rank resumes.

When one rank leaves, dies or reconfigures, the group of ranks ends on all its ranks, so that none
of them waits for a rank that has left.

Threads: one thread reconfigures and issues collectives; any thread may call `abort`.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final, Protocol

import torch
import torch.distributed as dist
from shoal_common.errors import ShoalError
from torch.distributed import Work
from torch.distributed.distributed_c10d import GroupName, PrefixStore, Store

from shoal_worker.backends.base import GroupEndedError
from shoal_worker.backends.gloo.forming import FormingGroup
from shoal_worker.backends.gloo.interruptible import InterruptibleGroup
from shoal_worker.backends.gloo.sockets import address_for
from shoal_worker.backends.python_group import ForwardingGroup

_NEVER: Final = "the process group has no ranks yet; call torch.distributed._reconfigure first"


class ReconfigureOptions(Protocol):
    """torch's class of the same name, which only some versions of torch have."""

    uuid: int
    handles: Collection[str]
    """Handles of the new ranks. A list determines the ranks by position; for a set, the group
    assigns them."""
    timeout: timedelta | None
    hints: dict[str, str]


class ReconfigurableGroup(ForwardingGroup):
    """Process group that forwards collectives to the group of ranks connected by the last
    `reconfigure`."""

    backend_name: ClassVar[str] = "shoal_gloo"
    supports_reconfigure: ClassVar[bool] = True

    def __init__(
        self, store: Store, rank: int, size: int, name: GroupName, timeout: timedelta
    ) -> None:
        """`store`: store shared by all processes that will ever connect. `rank`, `size`: results of
        `rank()` and `size()` before the first `reconfigure`. `timeout`: time limit of collectives,
        and of a `reconfigure` that has no limit of its own.
        """
        super().__init__(rank, size, name)
        self._store = store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        self._innermost = store
        """Keeps the store alive, because the other references are to the C++ half of a store
        written in Python."""
        self._place = rank, size
        self._timeout = timeout
        self._handle = f"shoal_gloo:{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex}"
        self._used: set[int] = set()
        self._lock = threading.Lock()
        """Guards all attributes below."""
        self._reason = _NEVER
        """Reason why there is currently no group of ranks; unused while there is one."""
        self._forming: FormingGroup | None = None
        self._group: InterruptibleGroup | None = None

    def rank(self) -> int:
        """Returns the rank assigned by the last `reconfigure`."""
        return self._place[0]

    def size(self) -> int:
        """Returns the number of ranks in the last `reconfigure`."""
        return self._place[1]

    # looked up by torch's C++ code
    getRank, getSize = rank, size  # noqa: N815

    def get_reconfigure_handle(self) -> str:
        """Returns the name by which `opts.handles` of `reconfigure` refers to this process. It
        never changes."""
        return self._handle

    def reconfigure(self, opts: ReconfigureOptions) -> Work:
        """Aborts the current group of ranks and connects the ranks of `opts.handles`.

        Must be called on all of these ranks, with the same new uuid and the same handles. Blocks
        until all are connected, for at most `opts.timeout`; `abort` ends the wait.

        Raises:
            DistBackendError: the uuid has been used before, or the handles are not distinct or do
                not contain this process. The group is unchanged.
            GroupEndedError: a rank did not connect, or disconnected. There is then no group; the
                call may be retried with a new uuid.
        """
        handles = sorted(opts.handles) if isinstance(opts.handles, set) else list(opts.handles)
        if opts.uuid in self._used:
            raise dist.DistBackendError(
                f"uuid={opts.uuid} was already used; expected a new uuid for each reconfigure"
            )
        if handles.count(self._handle) != 1 or len(set(handles)) != len(handles):
            raise dist.DistBackendError(
                f"handles={handles}: expected distinct handles, including that of this process, "
                f"{self._handle}"
            )
        self._used.add(opts.uuid)
        rank, size = handles.index(self._handle), len(handles)
        timeout = opts.timeout or self._timeout
        deadline = time.monotonic() + timeout.total_seconds()
        self._end(f"the process group was reconfigured with uuid {opts.uuid}")
        try:
            group = self._connect(opts.uuid, handles, deadline)
        except (ShoalError, RuntimeError) as error:
            self._reason = f"reconfigure with uuid {opts.uuid} failed: {error}"
            raise GroupEndedError(self._reason) from error
        self._place = rank, size
        group._set_group_name(self.group_name)
        with self._lock:
            self._group = group
        return _Done()

    def abort(self) -> None:
        """Aborts pending works and a pending `reconfigure`, and refuses collectives until the next
        `reconfigure`. Callable from any thread."""
        with self._lock:
            forming, group = self._forming, self._group
        if forming is not None:
            forming.give_up("the process group was aborted")
        if group is not None:
            group.abort()

    def shutdown(self) -> None:
        """Aborts the group and closes its connections. Idempotent."""
        self._end("the process group was shut down")

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Implements `ProcessGroup.monitored_barrier`; not interruptible."""
        self._live().monitored_barrier(timeout, wait_all_ranks)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _issue(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Work:
        work: Work = getattr(self._live(), name)(*arguments, **options)
        return work

    def _live(self) -> InterruptibleGroup:
        with self._lock:
            if self._group is None:
                raise GroupEndedError(self._reason)
            return self._group

    def _end(self, reason: str) -> None:
        """Aborts the current group, and blocks until Gloo has stopped writing to the tensors of the
        group's collectives."""
        with self._lock:
            group, self._group, self._reason = self._group, None, reason
        if group is not None:
            group.abort(reason)
            group.await_end()
            group.shutdown()

    def _connect(self, number: int, handles: Sequence[str], deadline: float) -> InterruptibleGroup:
        # Ranks with different handles use a different prefix. A separate store is used because the
        # connecting thread may hold the other store's lock while it waits.
        members = hashlib.sha256("\n".join(handles).encode()).hexdigest()[:16]
        own: Store = self._store.clone()  # type: ignore[attr-defined]  # missing in torch's stub
        store = PrefixStore(f"reconfigure/{number}/{members}", own)
        forming = FormingGroup(
            store,
            handles.index(self._handle),
            len(handles),
            hostname=address_for(self._store),
            connect_timeout=timedelta(seconds=max(0.001, deadline - time.monotonic())),
            timeout=self._timeout,
            short_sums=False,
        )
        with self._lock:
            self._forming = forming
        try:
            formed = forming.wait()
        finally:
            with self._lock:
                self._forming = None
        group = InterruptibleGroup(formed)
        group.watch()
        return group


class _Done(Work):
    """Work that is already complete."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future
