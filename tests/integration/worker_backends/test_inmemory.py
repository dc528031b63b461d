"""Ranks as threads: the results of `launch`, ranks that fail or make different calls, and ranks
without `launch`."""

from __future__ import annotations

import random
import re
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError, DeadlineError, MembershipChanged
from shoal_worker.backends import GroupEndedError
from shoal_worker.backends.collective import UnmatchedCollectiveError, reduce_parts
from shoal_worker.backends.inmemory.backend import InMemoryBackend
from shoal_worker.launch import launch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

_SHORT = timedelta(milliseconds=200)
_LONG = timedelta(seconds=20)


def _unmatched(*ranks: Callable[[], Any]) -> list[str]:
    """Returns each rank's error for mismatched collectives; `launch` raises only the
    first rank's."""
    received: list[str] = [""] * len(ranks)

    def be_rank() -> None:
        try:
            ranks[dist.get_rank()]()
        except UnmatchedCollectiveError as error:
            received[dist.get_rank()] = str(error)
            raise

    with pytest.raises(UnmatchedCollectiveError):
        launch(be_rank, world_size=len(ranks), timeout=_LONG)
    return received


# --- launch


def test_launch_returns_the_results_by_rank() -> None:
    assert launch(lambda factor: factor * dist.get_rank(), 10, world_size=3) == [0, 10, 20]


def test_process_is_unchanged_when_the_ranks_have_ended() -> None:
    world, hook, mesh = c10d._world, sys.excepthook, dist.device_mesh.DeviceMesh.__init__
    torch.manual_seed(3)
    expected = torch.Generator().manual_seed(3)
    launch(lambda: torch.rand(5), world_size=2)
    assert (c10d._world, sys.excepthook, dist.device_mesh.DeviceMesh.__init__) == (
        world,
        hook,
        mesh,
    )
    assert not dist.is_initialized()
    assert torch.equal(torch.rand(2), torch.rand(2, generator=expected))


def test_launches_are_isolated_from_each_other() -> None:
    def outer() -> tuple[int, list[int]]:
        return dist.get_world_size(), launch(dist.get_world_size, world_size=3)

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(launch, outer, world_size=2) for _ in range(2)]
        assert [one.result() for one in both] == [[(2, [3, 3, 3])] * 2] * 2


def test_each_rank_has_its_own_random_generators() -> None:
    def draw() -> list[float]:
        rank = dist.get_rank()
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        drawn = []
        for _ in range(3):
            drawn += [torch.rand(1).item(), random.random(), np.random.rand()]
            dist.barrier()
        return drawn

    def alone(rank: int) -> list[float]:
        generator, pythons, numpys = (
            torch.Generator().manual_seed(rank),
            random.Random(rank),
            np.random.RandomState(rank),
        )
        return [
            value
            for _ in range(3)
            for value in (
                torch.rand(1, generator=generator).item(),
                pythons.random(),
                numpys.rand(),
            )
        ]

    assert launch(draw, world_size=3) == [alone(rank) for rank in range(3)]


def test_ranks_interleave_the_same_way_every_time() -> None:
    def runs() -> list[int]:
        order: list[int] = []

        def be_rank() -> None:
            for _ in range(3):
                order.append(dist.get_rank())
                dist.barrier()

        launch(be_rank, world_size=4)
        return order

    first = runs()
    assert sorted(first) == sorted([0, 1, 2, 3] * 3)
    assert all(runs() == first for _ in range(3))


def test_collectives_in_autograd_hooks_find_their_rank() -> None:
    def sum_over_ranks(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total

    def be_rank() -> list[float]:
        leaf = torch.full((2,), dist.get_rank() + 1.0, requires_grad=True)

        def block(x: torch.Tensor) -> torch.Tensor:
            y = x * x
            if y.requires_grad:
                y.register_hook(sum_over_ranks)
            return y

        # The reentrant implementation runs a backward pass within the backward pass.
        checkpoint(checkpoint, block, leaf * 1.0, use_reentrant=True).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.tolist()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert launch(be_rank, world_size=3) == [[2.0 * 3 * (rank + 1)] * 2 for rank in range(3)]


def test_meshes_of_two_ranks_are_not_equal() -> None:
    """DTensor caches by mesh, for the entire process."""
    first, second = launch(lambda: init_device_mesh("cpu", (2,)), world_size=2)
    assert first != second


def test_threads_that_a_rank_starts_see_its_world() -> None:
    def be_rank() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(dist.get_rank).result()

    assert launch(be_rank, world_size=3) == [0, 1, 2]
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(dist.is_initialized).result()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, r"launch\(world_size=0\): expected at least 1"),
        (
            {"world_size": 2, "backend": "gloo"},
            "'gloo'.*this backend needs processes; start them with `shoal run`",
        ),
        ({"world_size": 2, "timeout": timedelta(0)}, r"timeout=0:00:00\): expected more than 0 s"),
    ],
)
def test_invalid_launches_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        launch(lambda: None, **arguments)


# --- failures


def test_a_rank_that_raises_ends_the_others_and_is_named() -> None:
    seen: list[str] = []

    def be_rank() -> None:
        if dist.get_rank() == 2:
            raise KeyError("broken")
        try:
            dist.all_reduce(torch.ones(1))
        except MembershipChanged as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError, match="broken") as caught:
        launch(be_rank, world_size=4)
    assert caught.value.__notes__ == ["This was raised by rank 2 of 4 in shoal.launch."]
    assert seen == ["rank 2 failed: KeyError: 'broken'"] * 3


def test_failing_rank_ends_groups_that_it_is_not_in() -> None:
    def be_rank() -> None:
        group = dist.new_group([0, 1])
        if dist.get_rank() == 2:
            raise OSError("disk")
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1), group=group)
        else:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(OSError, match="disk"):
        launch(be_rank, world_size=3)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            lambda: dist.all_reduce(torch.ones(2, 3)),
            lambda: dist.broadcast(torch.ones(2, 3), 0),
            [
                r"all_reduce\(SUM, float32\[2, 3\]\) on rank 0",
                r"broadcast\(root 0, float32\[2, 3\]\) on rank 1",
            ],
        ),
        (
            lambda: dist.all_reduce(torch.ones(2)),
            lambda: dist.all_reduce(torch.ones(3)),
            [r"float32\[2\]", r"float32\[3\]"],
        ),
        (
            lambda: dist.all_reduce(torch.ones(2)),
            lambda: dist.all_reduce(torch.ones(2, dtype=torch.float64)),
            [r"float32\[2\]", r"float64\[2\]"],
        ),
        (
            lambda: dist.all_reduce(torch.ones(1)),
            lambda: dist.all_reduce(torch.ones(1), dist.ReduceOp.MAX),
            ["SUM", "MAX"],
        ),
        (
            lambda: dist.broadcast(torch.ones(1), 0),
            lambda: dist.broadcast(torch.ones(1), 1),
            ["root 0", "root 1"],
        ),
        (
            lambda: dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2)),
            lambda: dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(3)),
            [r"rank 0 expects float32\[2\] from rank 1, which sends float32\[3\]"],
        ),
    ],
    ids=["kind", "size", "dtype", "op", "root", "part"],
)
def test_mismatched_collectives_raise_on_all_ranks_and_name_both(
    first: Callable[[], Any], second: Callable[[], Any], words: list[str]
) -> None:
    for received in _unmatched(first, second):
        for word in words:
            assert re.search(word, received)


def test_ranks_that_all_wait_for_each_other_are_reported_at_once() -> None:
    def receive() -> None:
        dist.recv(torch.empty(1), 0, tag=3)

    for received in _unmatched(lambda: dist.all_reduce(torch.ones(1)), receive):
        assert (
            "deadlock, all running ranks are waiting: rank 0 is waiting in "
            "all_reduce(SUM, float32[1]) (collective 1 of group 0); " in received
        )
        assert "rank 1 is waiting in recv(from rank 0, tag 3) of group 0" in received


def test_collectives_on_two_groups_in_opposite_order_are_reported_at_once() -> None:
    def be_rank() -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        for group in groups if dist.get_rank() == 0 else reversed(groups):
            dist.all_reduce(torch.ones(1), group=group)

    with pytest.raises(
        UnmatchedCollectiveError,
        match=r"rank 0 is waiting in .* of group 1.*; rank 1 is waiting in .* of group 2",
    ):
        launch(be_rank, world_size=2)


def test_message_of_the_wrong_size_ends_both_ranks() -> None:
    def receive() -> None:
        dist.recv(torch.empty(3), 0)

    def send() -> None:
        dist.send(torch.ones(2), 1)
        dist.barrier()

    assert (
        _unmatched(send, receive)
        == ["rank 0 sent torch.float32 [2] with tag 0, but rank 1 expects torch.float32 [3]"] * 2
    )


def test_rank_that_returns_early_is_named_by_those_that_wait_for_it() -> None:
    def be_rank() -> None:
        if dist.get_rank() != 1:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(GroupEndedError, match="rank 1 of group 0 has left the group"):
        launch(be_rank, world_size=3)


def test_contributions_of_a_departed_rank_still_count() -> None:
    def be_rank() -> float:
        total, message = torch.ones(1), torch.zeros(1)
        work = dist.all_reduce(total, async_op=True)
        if dist.get_rank() == 1:
            dist.isend(torch.full((1,), 5.0), 0)
            return 0.0
        dist.recv(message, 1)
        work.wait()
        return total.item() + message.item()

    assert launch(be_rank, world_size=2) == [7.0, 0.0]


def test_a_rank_that_keeps_its_turn_is_named_at_the_deadline() -> None:
    released = threading.Event()

    def be_rank() -> None:
        if dist.get_rank() == 1:
            released.wait(_LONG.total_seconds())
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            released.set()

    with pytest.raises(
        GroupEndedError,
        match=r"waited 0\.2 s in all_reduce.* \[0.* have arrived; rank 1 has issued nothing; "
        r".*rank 1 of the",
    ):
        launch(be_rank, world_size=3, timeout=_SHORT)


def test_rank_that_never_ends_is_abandoned_and_named() -> None:
    released = threading.Event()

    def be_rank() -> None:
        if dist.get_rank() == 0:
            dist.barrier()
        released.wait(_LONG.total_seconds())

    with pytest.raises(GroupEndedError) as caught:
        launch(be_rank, world_size=2, timeout=_SHORT)
    assert caught.value.__notes__[1] == "Still running 0.2 s later: shoal-rank-1."
    released.set()
    for thread in threading.enumerate():
        if thread.name.startswith("shoal-rank-"):
            thread.join(_LONG.total_seconds())


# --- without launch


def _form(size: int, timeout: timedelta = _LONG) -> list[InMemoryBackend]:
    store = dist.HashStore()
    backends = [InMemoryBackend() for _ in range(size)]
    _together(
        lambda rank: backends[rank].initialize(
            rank=rank, world_size=size, store=store, timeout=timeout
        ),
        size,
    )
    return backends


def _together(task: Callable[[int], Any], size: int) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(task, range(size)))


def test_plain_threads_can_be_ranks() -> None:
    backends = _form(3)
    totals = [torch.full((2,), float(rank)) for rank in range(3)]
    _together(lambda rank: backends[rank].all_reduce(totals[rank]), 3)
    assert [total.tolist() for total in totals] == [[3.0, 3.0]] * 3


def test_an_abort_ends_a_waiting_rank_with_its_reason() -> None:
    backends = _form(2)
    handle = backends[0].all_reduce(torch.ones(1), async_op=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(handle.wait)
        backends[1].abort("generation 9 began")
        with pytest.raises(MembershipChanged, match="generation 9 began"):
            waiting.result(_LONG.total_seconds())
    assert not any(backend.is_initialized for backend in backends)
    with pytest.raises(MembershipChanged, match="generation 9 began"):
        backends[0].barrier()


def test_wait_ends_at_its_deadline_and_names_the_positions_of_the_others() -> None:
    backends = _form(3, timeout=_SHORT)
    backends[1].all_reduce(torch.ones(4), async_op=True)
    with pytest.raises(
        GroupEndedError,
        match=r"rank 0 waited 0\.2 s in .*: ranks \[0, 1\] have arrived; rank 2 has issued nothing",
    ):
        backends[0].all_reduce(torch.ones(4))


def test_absent_ranks_are_named() -> None:
    with pytest.raises(
        DeadlineError,
        match=r"3 in-memory ranks took longer than connect_timeout=0\.2 s: ranks \[0, 2\] did not "
        r"arrive",
    ):
        InMemoryBackend().initialize(
            rank=1, world_size=3, store=dist.HashStore(), connect_timeout=_SHORT
        )


def test_rank_from_another_process_is_refused() -> None:
    store = dist.HashStore()
    store.set("room", "1-0123")
    with pytest.raises(
        ConfigurationError,
        match="process 1 also uses this store, but the ranks of an in-memory group are threads of "
        "one",
    ):
        InMemoryBackend().initialize(rank=0, world_size=1, store=store)


def test_groups_can_be_recreated_over_one_store() -> None:
    store = dist.HashStore()

    def cycle(rank: int) -> float:
        value = 0.0
        for _ in range(3):
            backend = InMemoryBackend()
            backend.initialize(rank=rank, world_size=2, store=store)
            total = torch.ones(1)
            backend.all_reduce(total)
            backend.shutdown()
            value += total.item()
        return value

    assert _together(cycle, 2) == [6.0, 6.0]


def test_reductions_are_in_rank_order() -> None:
    backends = _form(4)
    values = [1e8, 1.0, -1e8, 1.0]
    totals = [torch.tensor([value]) for value in values]
    _together(lambda rank: backends[rank].all_reduce(totals[rank]), 4)
    assert [total.item() for total in totals] == [1.0] * 4  # ((1e8 + 1) - 1e8) + 1 in float32


@pytest.mark.parametrize("op", [dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM])
def test_means_of_integers_are_refused(op: Any) -> None:
    with pytest.raises(ValueError, match=r"cannot reduce torch\.int64 with"):
        reduce_parts([torch.ones(1, dtype=torch.int64)] * 2, op)
