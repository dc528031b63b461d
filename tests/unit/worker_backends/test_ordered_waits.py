"""Collectives that only the device waits for, until the host asks once for all of them, tested on a
device without a GPU."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from shoal_common.errors import MembershipChanged
from shoal_worker.backends.nccl.backend import NCCLBackend
from shoal_worker.backends.waits import Waits
from shoal_worker.elastic.contract.generation import Generation, Peer
from shoal_worker.elastic.group.group import Group, GroupConfiguration

from tests.fake_device.library import in_threads
from tests.fake_device.ranks import PATIENCE, SEEDS, ProcessEnded, Ranks, close, outcome, started
from tests.zygote.children import eventually

_SHORT = timedelta(seconds=0.2)


@pytest.mark.parametrize("seed", SEEDS)
def test_later_work_finds_the_result_without_a_host_wait(
    seed: int,
) -> None:
    ranks = Ranks(3, seed)
    backends = ranks.form()

    def use(rank: int) -> Any:
        tensor, waited = torch.full((3,), rank + 1.0), []
        with mock.patch.object(backends[rank]._group.waits, "begin", waited.append):
            for _ in range(4):
                backends[rank].order(started(backends[rank], tensor))
                tensor.div_(3)
            assert backends[rank].unsettled
            backends[rank].settle()
        assert not backends[rank].unsettled
        return tensor.tolist(), waited

    assert in_threads([lambda rank=rank: use(rank) for rank in range(3)]) == [([2.0] * 3, [])] * 3
    close(backends)


@pytest.mark.parametrize("seed", SEEDS)
def test_lost_collective_raises_at_the_hosts_wait_once_memory_is_unused(
    seed: int,
) -> None:
    ranks = Ranks(2, seed)
    backends = ranks.form()
    tensor = torch.ones(3)
    work = started(backends[0], tensor)
    threading.Thread(target=backends[1].abort, args=["a fault"]).start()
    # the end may already have been noticed
    assert outcome(lambda: backends[0].order(work)) is None or not backends[0].is_initialized
    with pytest.raises(MembershipChanged):
        backends[0].settle()
    tensor.fill_(5)
    ranks.run_on()
    assert tensor.tolist() == [5.0] * 3
    close(backends)


@pytest.mark.parametrize("seed", SEEDS)
def test_nccl_error_behind_the_order_is_reported_at_the_hosts_wait(
    seed: int,
) -> None:
    ranks = Ranks(2, seed)
    backends = ranks.form()
    tensors = [torch.ones(3), torch.ones(3)]
    works = [started(backend, tensor) for backend, tensor in zip(backends, tensors, strict=True)]
    backends[0].order(works[0])
    ranks.devices[0].natives[0]._stream.error = "unhandled system error, remote process exited"
    with pytest.raises(
        MembershipChanged,
        match=r"allreduce on rank 0 of 2 failed: NCCL error: unhandled system error",
    ):
        backends[0].settle()
    assert not backends[0].is_initialized
    close(backends)


def test_finished_works_are_released_when_the_next_is_ordered() -> None:
    ranks = Ranks(1)
    (backend,) = ranks.form()
    for _ in range(50):
        backend.order(started(backend, torch.ones(3)))
    assert len(backend._group.ordered.take()) == 1
    close([backend])


def test_host_blocked_behind_a_collective_is_freed_at_the_timeout() -> None:
    """A host that waits for its device, whose stream waits for a stalled peer, is freed when the
    collective exceeds its timeout."""
    ranks = Ranks(2)
    backends = ranks.form(timeout=_SHORT)
    assert outcome(lambda: backends[0].order(started(backends[0], torch.ones(3)))) is None
    eventually(lambda: not backends[0].is_initialized, "the group to end")
    with pytest.raises(
        MembershipChanged, match=r"allreduce on rank 0 of 2 took longer than 0:00:00\.2"
    ):
        backends[0].settle()
    close(backends)


def test_timeout_starts_when_a_collective_is_the_next_to_run() -> None:
    """A collective's timeout begins when the collective is the next to run, so waiting behind
    others does not count."""
    ranks = Ranks(1)
    (backend,) = ranks.form(timeout=_SHORT)
    for _ in range(2):
        backend.order(started(backend, torch.ones(3)))
    # the collectives have run, and the host has not asked
    assert not threading.Event().wait(2 * _SHORT.total_seconds())
    backend.settle()
    close([backend])
    eventually(
        lambda: not [t for t in threading.enumerate() if t.name == "shoal-nccl-time"],
        "the thread that measures the time to end",
    )


def test_a_device_that_fails_behind_the_order_ends_the_process_of_its_rank() -> None:
    ranks = Ranks(2)
    backends = ranks.form()
    works = [started(backend, torch.ones(3)) for backend in backends]
    backends[0].order(works[0])
    ranks.machine.failed[0] = "an illegal memory access was encountered"
    ended = outcome(backends[0].settle)
    assert isinstance(ended, ProcessEnded)
    assert "cuda:0 failed (CUDA error: an illegal memory access was encountered)" in ended.args[1]


# --- a group and its subgroups


def _generation(rank: int, size: int) -> Generation:
    peers = tuple(
        Peer(rank=each, member_id=str(each), host="", donor_address="", joining=False)
        for each in range(size)
    )
    return Generation(number=1, nonce="", peers=peers, rank=rank, interrupts_below=0)


class Groups:
    """One group per rank, over a few ranks, from which subgroups can be made."""

    def __init__(self, size: int, seed: int) -> None:
        self.ranks = Ranks(size, seed)
        self.size = size
        self._store = dist.HashStore()
        self._answers = in_threads([lambda rank=rank: self._connect(rank) for rank in range(size)])
        self.groups: list[Group] = self._answers

    def _connect(self, rank: int) -> Group:
        configuration = GroupConfiguration(
            make_backend=lambda: self.ranks.backend(rank),
            store=lambda name: dist.PrefixStore(name, self._store),
            hostname=None,
            connect_timeout=PATIENCE,
            collective_timeout=PATIENCE,
        )
        backend, generation = self.ranks.backend(rank), _generation(rank, self.size)
        configuration.initialize(backend, generation, dist.PrefixStore("all", self._store))
        return Group(generation, backend, None, configuration)

    def close(self) -> None:
        in_threads([group.close for group in self.groups])


@pytest.mark.parametrize("seed", SEEDS)
def test_no_rank_commits_a_step_with_a_lost_collective_in_a_subgroup(seed: int) -> None:
    """No rank closes a step if a collective in a subgroup was lost. The hosts' sum stands in for
    the commit all-reduce, which the hosts reach while the device still runs."""
    made = Groups(3, seed)

    def step(rank: int) -> Any:
        group = made.groups[rank]
        part = group.subgroup([0, 1], "pair")
        if part is not None:
            tensor = torch.ones(3)
            # rank 1 never joins this all-reduce
            work = part.all_reduce_async(tensor) if rank == 0 else None
            if work is not None:
                threading.Timer(0.1, part.abort, ["a fault"]).start()
                part.order(work)
        return group.sum_numbers([1.0])

    outcomes = in_threads([lambda rank=rank: step(rank) for rank in range(3)])
    assert all(isinstance(each, MembershipChanged) for each in outcomes)
    made.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_caller_that_knows_a_group_has_ended_has_exclusive_use_of_the_memory(seed: int) -> None:
    """Once a rank learns that its group has ended, no kernel writes to its tensors, even if another
    thread ended the group."""
    made = Groups(2, seed)
    tensor = torch.ones(3)
    work = made.groups[0].all_reduce_async(tensor)
    assert work is not None
    made.groups[0].abort("superseded")
    for call in (made.groups[0].wait, made.groups[0].order):
        with pytest.raises(MembershipChanged, match="superseded"):
            call(work)
        tensor.fill_(5)
        made.ranks.run_on()
        assert tensor.tolist() == [5.0] * 3
    made.close()


def test_host_waits_are_recorded() -> None:
    """A wait of the host for a collective is recorded in `Waits`. Heartbeats report these records,
    and other tests check them."""
    ranks = Ranks(2)
    backends = ranks.form()
    begun: list[str] = []
    with mock.patch.object(Waits, "begin", lambda _, what: begun.append(what)):
        in_threads(
            [lambda backend=backend: started(backend, torch.ones(3)).wait() for backend in backends]
        )
    assert "allreduce" in begun
    assert isinstance(backends[0], NCCLBackend)
    close(backends)
