"""All-gathers that the project implements instead of Gloo end with their group like every
collective, and refuse what Gloo refuses."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from shoal_common.errors import MembershipChanged
from shoal_worker.backends.gloo.backend import GlooBackend
from shoal_worker.backends.gloo.interruptible import BROADCASTS_FROM_BYTES
from torch._C._distributed_c10d import AllgatherOptions

_DEADLINE_S = 60.0
_ELEMENTS = BROADCASTS_FROM_BYTES // 4


@pytest.fixture(params=[2, 3])
def group(request: pytest.FixtureRequest) -> Iterator[list[GlooBackend]]:
    """Ranks in this process. Two ranks exchange their tensors; larger groups broadcast them."""
    size: int = request.param
    store, backends = dist.HashStore(), [GlooBackend() for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        forming = [
            pool.submit(backend.initialize, rank=rank, world_size=size, store=store)
            for rank, backend in enumerate(backends)
        ]
        for one in forming:
            one.result(_DEADLINE_S)
    yield backends
    for backend in backends:
        backend.shutdown()


@pytest.mark.parametrize("aborting", [0, 1], ids=["own abort", "peer's abort"])
def test_an_abort_ends_an_all_gather_and_its_future(
    group: list[GlooBackend], aborting: int
) -> None:
    output, given = torch.empty(len(group) * _ELEMENTS), torch.ones(_ELEMENTS)
    work = group[0].process_group.all_gather_single(output, given, AllgatherOptions())
    future = work.get_future()
    assert not work.is_completed()
    group[aborting].abort("generation 9 began")
    with pytest.raises(
        MembershipChanged,
        match="generation 9 began" if aborting == 0 else "was lost|ended|failed|closed",
    ):
        work.wait()
    with pytest.raises(RuntimeError, match="GroupEndedError"):
        future.wait()
    assert work.is_completed()
    assert not work.is_success()


def test_small_and_large_gathers_can_run_concurrently(group: list[GlooBackend]) -> None:
    handles, outputs = [], []
    for rank, backend in enumerate(group):
        for size in (1, _ELEMENTS, 3, 2 * _ELEMENTS + 1):
            outputs.append(torch.empty(len(group), size))
            handles.append(
                backend.all_gather(outputs[-1], torch.full((size,), float(rank)), async_op=True)
            )
    for handle in handles:
        handle.wait()
    assert all(part.eq(rank).all() for output in outputs for rank, part in enumerate(output))


def test_connections_within_a_host_send_little_at_a_time(group: list[GlooBackend]) -> None:
    """A send call holds a lock for which Gloo's other thread spins
    (docs/explanation/backends.md#gloo-faster-collectives)."""
    sockets = [
        copy
        for backend in group
        if backend._group is not None
        for copy in backend._group._sockets._copies
    ]
    assert len(sockets) >= len(group) * (len(group) - 1)
    assert {one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for one in sockets} == {1 << 20}
    handles, outputs = [], []
    for rank, backend in enumerate(group):
        outputs.append(torch.empty(len(group), 1 << 20))
        handles.append(
            backend.all_gather(outputs[-1], torch.full((1 << 20,), float(rank)), async_op=True)
        )
    for handle in handles:
        handle.wait()
    assert all(part.eq(rank).all() for output in outputs for rank, part in enumerate(output))


def test_outputs_of_the_wrong_size_are_refused(group: list[GlooBackend]) -> None:
    outputs = [torch.empty(_ELEMENTS) for _ in group[1:]] + [torch.empty(_ELEMENTS + 1)]
    with pytest.raises(RuntimeError, match="invalid tensor size"):
        group[0].process_group.allgather([outputs], [torch.ones(_ELEMENTS)], AllgatherOptions())
