"""Gloo on tensors of a device: results of collectives and messages, the order of the device's
computations around them, and a new group after an abort.

Without a GPU, the device is the host, and its tensors are treated as ones that Gloo cannot send
directly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from shoal_common.errors import MembershipChanged
from shoal_worker.backends.gloo import on_devices
from shoal_worker.backends.gloo.backend import GlooBackend
from torch.distributed import AllreduceOptions

from tests.fake_device.library import in_threads
from tests.gpu.devices import is_there, needs, rehearsal
from tests.zygote.children import eventually

_TIMEOUT = timedelta(seconds=60)
_RANKS = 2
_MANY = 1 << 20
"""Number of elements that requires a broadcast, an exchange, or many chunks."""


@pytest.fixture(params=[pytest.param("cpu", marks=rehearsal), pytest.param("cuda", marks=needs(1))])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    is_there(request.param)
    with mock.patch.object(on_devices, "is_elsewhere", return_value=True):
        yield torch.device(request.param)


def groups(store: dist.Store, generation: int = 1) -> list[GlooBackend]:
    """Returns the connected backends of a group of two ranks."""
    backends = [GlooBackend() for _ in range(_RANKS)]
    prefix = dist.PrefixStore(str(generation), store)

    def connect(rank: int) -> None:
        backends[rank].initialize(
            rank=rank, world_size=_RANKS, store=prefix, timeout=_TIMEOUT, connect_timeout=_TIMEOUT
        )

    assert (
        in_threads([lambda rank=rank: connect(rank) for rank in range(_RANKS)]) == [None] * _RANKS
    )
    return backends


@pytest.fixture
def backends() -> Iterator[list[GlooBackend]]:
    made = groups(dist.HashStore())
    yield made
    for backend in made:
        backend.shutdown()


def on_both(call: Callable[[int], Any]) -> list[Any]:
    """Returns the result of each rank's call. Raises the error of a failed rank."""
    outcomes = in_threads([lambda rank=rank: call(rank) for rank in range(_RANKS)])
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("elements", [12, _MANY])
def test_collectives_and_messages_give_correct_results(
    backends: list[GlooBackend], device: torch.device, dtype: torch.dtype, elements: int
) -> None:
    base = (torch.arange(elements, device=device) % 64).to(dtype)

    def use(rank: int) -> list[torch.Tensor]:
        backend, mine, peer = backends[rank], base + rank, 1 - rank
        summed = mine.clone()
        backend.all_reduce(summed)
        gathered = torch.empty(_RANKS * elements, dtype=dtype, device=device)
        backend.all_gather(gathered, mine)
        part = torch.empty(elements // _RANKS, dtype=dtype, device=device)
        backend.reduce_scatter(part, mine)
        exchanged = torch.empty_like(mine)
        backend.all_to_all(exchanged, mine)
        given = mine.clone()
        backend.broadcast(given, 1)
        sent, received = backend.send(mine, peer, async_op=True), torch.empty_like(mine)
        backend.recv(received, peer)
        sent.wait()
        return [each.cpu() for each in (summed, gathered, part, exchanged, given, received)]

    host, half = base.cpu(), elements // _RANKS
    for rank, (summed, gathered, part, exchanged, given, received) in enumerate(on_both(use)):
        assert torch.equal(summed, host + host + 1)
        assert torch.equal(gathered, torch.cat([host, host + 1]))
        assert torch.equal(part, (host + host + 1)[rank * half : (rank + 1) * half])
        assert torch.equal(
            exchanged,
            torch.cat(
                [(host + source)[rank * half : (rank + 1) * half] for source in range(_RANKS)]
            ),
        )
        assert torch.equal(given, host + 1)
        assert torch.equal(received, host + 1 - rank)


def test_group_reformed_after_an_abort_gives_correct_results(
    device: torch.device,
) -> None:
    store = dist.HashStore()
    for generation in range(1, 4):
        backends = groups(store, generation)
        tensors = [torch.full((_MANY,), rank + 1.0, device=device) for rank in range(_RANKS)]
        on_both(
            lambda rank, backends=backends, tensors=tensors: backends[rank].all_reduce(
                tensors[rank]
            )
        )
        assert all(bool((tensor == 3).all()) for tensor in tensors)
        # rank 1 never joins
        work = backends[0].process_group.allreduce([tensors[0]], AllreduceOptions())
        threading.Timer(0.05, backends[1].abort, ["a fault"]).start()
        with pytest.raises(MembershipChanged):
            work.wait()
        tensors[0].fill_(5)
        for backend in backends:
            backend.shutdown()
        assert bool((tensors[0] == 5).all())


# --- the order of streams, on a device only


@pytest.mark.parametrize(
    "followed", [False, True], ids=["finished by the waiting thread", "finished by Gloo's thread"]
)
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs(1))], indirect=True)
def test_collectives_respect_the_order_of_a_side_stream(
    backends: list[GlooBackend], device: torch.device, collective: str, followed: bool
) -> None:
    """A collective on a caller's stream sends what earlier kernels on the stream write, and later
    kernels see its result, although the stream is behind the host."""

    def use(rank: int) -> torch.Tensor:
        group, side = backends[rank].process_group, torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            mine = torch.zeros(_MANY, device=device)
            torch.cuda._sleep(100_000_000)
            mine.add_(rank + 1.0)
            if collective == "all_reduce":
                result, work = mine, group.allreduce([mine], AllreduceOptions())
            elif collective == "reduce_scatter":
                result = torch.zeros(_MANY // _RANKS, device=device)
                work = group.reduce_scatter_single(result, mine)
            else:
                result = torch.zeros(_RANKS * _MANY, device=device)
                work = group.all_gather_single(result, mine)
            if followed:
                parts = getattr(work, "_parts", [work])
                for part in parts:
                    part.follow()
                eventually(
                    lambda parts=parts: all(part._over for part in parts),
                    "the thread that finishes the collective",
                )
            work.wait()
            doubled = result * 2
        side.synchronize()
        return doubled.cpu()

    for rank, doubled in enumerate(on_both(use)):
        if collective == "all_gather":
            assert torch.equal(
                doubled, torch.cat([torch.full((_MANY,), 2.0), torch.full((_MANY,), 4.0)])
            ), rank
        else:
            assert bool((doubled == 6).all()), rank
