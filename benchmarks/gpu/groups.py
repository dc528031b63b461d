"""Measures copies between a device and the host, and the cost of an NCCL group with a single rank:
connecting, leaving, and collectives for which the host waits one by one or all at once.

With a single rank, Shoal usually has no group; these benchmarks create one nevertheless. Nothing is
sent, so only the cost of the host and of the library is measured.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from shoal_worker.backends.nccl.backend import NCCLBackend
from shoal_worker.backends.nccl.device import CudaDevice
from torch.distributed import AllreduceOptions

_PATIENCE: Final = timedelta(seconds=120)
_SIZES_MIB: Final = (1, 16, 256)
_REPEATED: Final = 10
COLLECTIVES: Final = 24
_BYTES: Final = 4 << 20
GROUPS: Final = 20


@dataclass(frozen=True, kw_only=True)
class Copied:
    """One way to copy memory to the host."""

    mib: int
    pinned: bool
    bytes_per_s: tuple[float, ...]
    """Rate of each copy, measured from its start until the device has completed it."""


def copies(device: torch.device) -> list[Copied]:
    """Measures copies to the host by size, into pinned and into pageable memory."""
    found = []
    for mib in _SIZES_MIB:
        source = torch.ones(mib << 20, dtype=torch.uint8, device=device)
        for pinned in (False, True):
            target = torch.empty(mib << 20, dtype=torch.uint8, pin_memory=pinned)
            seconds = [
                _timed(functools.partial(target.copy_, source, non_blocking=True), device)
                for _ in range(_REPEATED + 1)
            ][1:]
            found.append(
                Copied(
                    mib=mib,
                    pinned=pinned,
                    bytes_per_s=tuple((mib << 20) / each for each in seconds),
                )
            )
    return found


@dataclass(frozen=True, kw_only=True)
class GroupsOfOne:
    """Measurements of groups of one rank that were created and destroyed one after the other."""

    connect_s: tuple[float, ...]
    leave_s: tuple[float, ...]
    lost_bytes: int
    """Decrease of the device's free memory from the second group to the last."""


def come_and_go(
    make: Callable[[], CudaDevice],
    *,
    groups: int = GROUPS,
    split: bool = False,
    finalize: bool = False,
) -> GroupsOfOne:
    """Repeatedly creates a group of one rank, performs an all-reduce in it, and leaves it.

    `split`: True to split each group off another one. `finalize`: True to leave each group as all
    ranks do at the end of a run; False to abort it.
    """
    whole = alone(make()) if split else None
    connect_s, leave_s, free = [], [], []
    for _ in range(groups + 2):
        begun = time.perf_counter()
        backend = alone(make(), whole)
        connect_s.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        if finalize and backend.all_leave(_PATIENCE):
            backend.finalize()()
        backend.shutdown()
        leave_s.append(time.perf_counter() - begun)
        free.append(torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0)
    if whole is not None:
        whole.shutdown()
    return GroupsOfOne(
        connect_s=tuple(connect_s), leave_s=tuple(leave_s), lost_bytes=free[1] - free[-1]
    )


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Measurements of `COLLECTIVES` all-reduces."""

    waited_for_s: float
    """Total time in seconds if the host waits for each all-reduce before it starts the next one."""
    ordered_s: float
    """Total time in seconds if only the device waits for each all-reduce, and the host waits once
    at the end."""
    started_s: float
    """Part of `ordered_s` that passes before the host starts to wait."""


def collectives(make: Callable[[], CudaDevice]) -> Collectives:
    """Runs all-reduces of 4 MiB in a group of one, each on the result of the previous one."""
    backend = alone(make())
    try:
        tensor = torch.zeros(_BYTES // 4, device=make().device)
        for _ in range(2):  # the first time nothing is warm
            begun = time.perf_counter()
            for _ in range(COLLECTIVES):
                _start(backend, tensor).wait()
            waited_for = time.perf_counter() - begun
            begun = time.perf_counter()
            for _ in range(COLLECTIVES):
                backend.order(_start(backend, tensor))
            started = time.perf_counter() - begun
            backend.settle()
            ordered = time.perf_counter() - begun
    finally:
        backend.shutdown()
    return Collectives(waited_for_s=waited_for, ordered_s=ordered, started_s=started)


def alone(device: CudaDevice, whole: NCCLBackend | None = None) -> NCCLBackend:
    """Returns a group of one rank with an NCCL communicator, after a first all-reduce. If `whole`
    is given, the group is split off it."""
    backend = NCCLBackend(device)
    if whole is not None:
        os.environ["SHOAL_NCCL_SPLIT"] = "1"
        backend.comes_from(whole, 0)
    backend.initialize(rank=0, world_size=1, store=dist.HashStore(), connect_timeout=_PATIENCE)
    backend.all_reduce(torch.ones(8, device=device.device))
    return backend


def _start(backend: NCCLBackend, tensor: torch.Tensor) -> dist.Work:
    return backend.process_group.allreduce([tensor], AllreduceOptions())


def _timed(call: Callable[[], object], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    return time.perf_counter() - begun
