"""MPI, through mpi4py, for clusters that start processes and communicate with MPI: `mpiexec -n 4
python train.py`.

Rank and world size come from MPI's world, so no store is needed: `MPIBackend().initialize()`, or
`init_process_group("shoal_mpi", init_method="mpi://")`. Each group has its own communicator.

Start scripts with `mpiexec -n 4 python -m mpi4py train.py`, so that an exception on one rank
terminates all ranks. MPI itself terminates the entire job when a process dies, so a group on MPI
cannot shrink. Elastic training requires "gloo" or "nccl".
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from shoal_common.errors import ConfigurationError, DeadlineError
from torch.distributed import HashStore, Store

from shoal_worker.backends.base import (
    DEFAULT_CONNECT_TIMEOUT,
    DEFAULT_TIMEOUT,
    CommunicationBackend,
    GroupEndedError,
)
from shoal_worker.backends.worlds import Seat
from shoal_worker.torch_internals import _DistributedBackendOptions

if TYPE_CHECKING:
    from shoal_worker.backends.mpi.group import MPIGroup


class MPIBackend(CommunicationBackend):
    """Backend for CPU tensors, with its own communicator that spans MPI's world or part of it.

    `abort` notifies the other ranks with a message, which they read while they wait and when they
    issue an operation. MPI cannot cancel pending operations: they are abandoned, their buffers are
    kept until the process exits, and the MPI library may refuse to finalize. If a rank dies without
    sending a message, the other ranks depend on MPI's launcher to notice it, or wait until the
    timeout.
    """

    name: ClassVar[str] = "mpi"
    averages_natively: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._group: MPIGroup | None = None

    def initialize(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        store: Store | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        connect_timeout: timedelta = DEFAULT_CONNECT_TIMEOUT,
        hostname: str | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        """Joins a group of all ranks in MPI's world or, if `members` is given, of some of them.
        `rank` and `world_size` must be those of this process in the group; None: those in MPI's
        world. `store` and `hostname` are unused."""
        world = _mpi().COMM_WORLD
        super().initialize(
            rank=world.rank if rank is None else rank,
            world_size=world.size if world_size is None else world_size,
            store=store or HashStore(),
            timeout=timeout,
            connect_timeout=connect_timeout,
            hostname=hostname,
            members=members,
        )

    def _connect(
        self, store: Store, timeout: timedelta, connect_timeout: timedelta, hostname: str | None
    ) -> dist.ProcessGroup:
        from shoal_worker.backends.mpi.group import MPIGroup

        world = _mpi().COMM_WORLD
        if self._members is not None:
            # Creates a communicator for part of MPI's world. MPI offers no deadline for this wait.
            part = world.Create_group(world.group.Incl(list(self._members)))
            _check_place(self.rank, self.world_size, part)
            self._group = MPIGroup(part, "mpi", timeout)
            return self._group
        _check_place(self.rank, self.world_size, world)
        communicator, request = world.Idup()
        deadline = time.monotonic() + connect_timeout.total_seconds()
        while not request.Test():
            if self._reason is not None:
                raise GroupEndedError(self._reason)
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"connecting {self.world_size} MPI ranks took longer than "
                    f"connect_timeout={connect_timeout.total_seconds():g} s: not all ranks have "
                    "called initialize()",
                    reason="CONNECT_TIMEOUT",
                )
            time.sleep(0.0002)
        self._group = MPIGroup(communicator, "mpi", timeout)
        return self._group

    @property
    def is_initialized(self) -> bool:
        """True if collectives can be issued: the group is initialized and, as far as this rank
        knows, has not ended."""
        return super().is_initialized and self._group is not None and self._group.reason is None

    def _break(self) -> None:
        group, reason = self._group, self._reason
        if group is not None:
            group.abort(reason or "")

    def shutdown(self) -> None:
        """Releases the group without notifying other ranks. Must be called after a collective of
        all ranks. Idempotent."""
        group = self._group
        if group is not None:
            group.shutdown()
        with self._lock:
            self._reason = self._reason or f"backend {self.name!r} was shut down"
        self._release()

    def _release(self) -> None:
        self._group = self._process_group = None

    def _is_broken(self, error: RuntimeError) -> bool:
        return False  # the group itself raises MembershipChanged


def own_seat(timeout: timedelta) -> Seat:
    """Starts MPI and returns this process's rank and place in MPI's world, from which a session is
    created.

    Raises:
        ConfigurationError: mpi4py or the MPI library is missing.
    """
    world = _mpi().COMM_WORLD
    return Seat(
        rank=world.rank,
        world_size=world.size,
        store=HashStore(),
        timeout=timeout,
        backend=MPIBackend.name,
    )


def create_group(options: _DistributedBackendOptions, _: Any) -> MPIGroup:
    """Creates the default group or a group for new_group. Called by torch, only on the ranks of the
    group. Waits for these ranks without a deadline, because MPI offers none."""
    from shoal_worker.backends.mpi.group import MPIGroup

    mpi = _mpi()
    members = options.global_ranks_in_group or range(mpi.COMM_WORLD.size)
    communicator = mpi.COMM_WORLD.Create_group(mpi.COMM_WORLD.group.Incl(list(members)))
    _check_place(options.group_rank, options.group_size, communicator)
    return MPIGroup(communicator, options.group_id, options.timeout)


def rendezvous(
    url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """Yields the rank and world size from MPI, with a store for this process only, because groups
    on MPI need no shared store."""
    world = _mpi().COMM_WORLD
    yield HashStore(), world.rank, world.size


def _check_place(rank: int, size: int, communicator: Any) -> None:
    if (rank, size) != (communicator.rank, communicator.size):
        raise ConfigurationError(
            f"rank={rank}, world_size={size}: MPI started this process as rank "
            f"{communicator.rank} of {communicator.size}; start it with `mpiexec -n {size}`, or "
            "leave both arguments out"
        )


def _mpi() -> Any:
    """Returns mpi4py's module. Its first import starts MPI. Raises ConfigurationError if mpi4py or
    the MPI library is missing."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigurationError(
            f"backend='mpi' needs mpi4py and an MPI library ({error}); install them with `pip "
            "install shoal-worker[mpi]`"
        ) from error
    return MPI
