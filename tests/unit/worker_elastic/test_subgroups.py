"""Subgroups of a generation's group: their members, and how failures end them together."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError, MembershipChanged, PreconditionError
from shoal_worker.backends.base import CommunicationBackend
from shoal_worker.backends.gloo.backend import GlooBackend
from shoal_worker.backends.inmemory.backend import InMemoryBackend
from shoal_worker.elastic.contract.generation import Generation, Peer
from shoal_worker.elastic.group.group import Group, GroupConfiguration
from shoal_worker.elastic.session.worker_process import current_session
from torch import nn
from torch.distributed import HashStore, PrefixStore

WORLD = 4
CONNECT_TIMEOUT = timedelta(seconds=10)
"""Timeout for connecting. The thread of Gloo that waits for a rank which never connects runs for
the same time."""
TIMEOUT = timedelta(seconds=60)
BACKENDS = [InMemoryBackend, GlooBackend]


def ranks(
    make_backend: Callable[[], CommunicationBackend], do: Callable[[Group], Any]
) -> list[Any]:
    """Runs `do(group)` on each of four ranks and returns its results or errors."""
    store, results, done = HashStore(), [None] * WORLD, threading.Barrier(WORLD)
    configuration = GroupConfiguration(
        make_backend=make_backend,
        store=lambda name: PrefixStore(name, store),
        hostname="127.0.0.1",
        connect_timeout=CONNECT_TIMEOUT,
        collective_timeout=TIMEOUT,
    )
    peers = tuple(
        Peer(rank=rank, member_id=str(rank), host="", donor_address="", joining=False)
        for rank in range(WORLD)
    )

    def be(rank: int) -> None:
        generation = Generation(
            number=1, nonce="0" * 32, peers=peers, rank=rank, interrupts_below=0
        )
        backend, own = make_backend(), PrefixStore("all", store)
        configuration.initialize(backend, generation, own)
        group = Group(generation, backend, own, configuration)
        try:
            results[rank] = do(group)
        except Exception as error:  # returned to the test
            results[rank] = error
        done.wait(60)
        group.close()

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def two_axes(group: Group) -> tuple[Group, Group]:
    """Arranges the ranks as 0 1 / 2 3 and returns this rank's row and column."""
    rows = [group.subgroup([2 * row, 2 * row + 1], f"row {row}") for row in range(2)]
    columns = [group.subgroup([column, column + 2], f"column {column}") for column in range(2)]
    (row,), (column,) = ([part for part in parts if part is not None] for parts in (rows, columns))
    return row, column


@pytest.mark.parametrize("make_backend", BACKENDS)
def test_each_axis_sums_over_its_own_ranks(
    make_backend: Callable[[], CommunicationBackend],
) -> None:
    def do(group: Group) -> Any:
        sums = []
        for part in (*two_axes(group), group):
            tensor = torch.tensor([float(10**group.rank)])
            part.all_reduce(tensor)
            sums.append(int(tensor))
        row, column = group._parts
        return (
            sums,
            [peer.rank for peer in row.generation.peers],
            column.rank,
            group.subgroup(range(WORLD), "all") is group,
        )

    assert ranks(make_backend, do) == [
        ([11, 101, 1111], [0, 1], 0, True),
        ([11, 1010, 1111], [0, 1], 0, True),
        ([1100, 101, 1111], [2, 3], 1, True),
        ([1100, 1010, 1111], [2, 3], 1, True),
    ]


@pytest.mark.parametrize("make_backend", BACKENDS)
def test_connections_with_one_name_are_separate(
    make_backend: Callable[[], CommunicationBackend],
) -> None:
    """Messages of one connection never reach another, although several models connect the ranks
    under the same name."""

    def do(group: Group) -> Any:
        again = [group.connected_again("the models") for _ in range(2)]
        halves = [group.subgroup([0, 1], "half"), group.subgroup([0, 1], "half")]
        tensors = [torch.tensor([float(10**group.rank)]), torch.tensor([2.0 * 10**group.rank])]
        order = (0, 1) if group.rank % 2 else (1, 0)
        works = {number: again[number].all_reduce_async(tensors[number]) for number in order}
        for number in order:
            again[number].wait(works[number])
        sums = [int(tensor) for tensor in tensors]
        for part in halves:
            if part is not None:
                part.all_reduce(tensors[0])
        return sums, int(tensors[0])

    assert ranks(make_backend, do) == [
        ([1111, 2222], 4444),
        ([1111, 2222], 4444),
        ([1111, 2222], 1111),
        ([1111, 2222], 1111),
    ]


@pytest.mark.parametrize("make_backend", BACKENDS)
def test_messages_of_very_different_lengths_arrive_complete_and_in_order(
    make_backend: Callable[[], CommunicationBackend],
) -> None:
    payloads = [b"short", bytes(range(256)) * 5000, b"", b"other"]

    def do(group: Group) -> Any:
        return group.exchange(payloads[group.rank]) == payloads

    assert ranks(make_backend, do) == [True] * WORLD


@pytest.mark.parametrize("make_backend", BACKENDS)
def test_failure_in_one_subgroup_ends_the_group_for_all(
    make_backend: Callable[[], CommunicationBackend],
) -> None:
    def do(group: Group) -> None:
        row, column = two_axes(group)
        group.exchange(b"")
        if group.rank == 0:
            row.abort("rank 0 has had enough")
        elif group.rank == 1:
            row.all_reduce(torch.ones(1))
        elif group.rank == 2:
            column.all_reduce(torch.ones(1))
        else:
            group.all_reduce(torch.ones(1))
        group.all_reduce(torch.ones(1))

    assert all(isinstance(each, MembershipChanged) for each in ranks(make_backend, do))


@pytest.mark.parametrize("make_backend", BACKENDS)
def test_rank_that_waits_for_another_to_form_a_subgroup_is_freed_when_its_group_ends(
    make_backend: Callable[[], CommunicationBackend],
) -> None:
    waiting, group_of_0 = threading.Event(), []

    def make() -> CommunicationBackend:
        if group_of_0:  # this backend is for the subgroup
            waiting.set()
        return make_backend()

    def do(group: Group) -> None:
        group.exchange(b"")
        if group.rank == 0:
            group_of_0.append(group)
            group.subgroup([0, 1], "some")
        elif group.rank == 1:
            assert waiting.wait(20)
            group_of_0[0].abort("a newer generation began")

    freed = ranks(make, do)[0]
    assert isinstance(freed, MembershipChanged)
    assert "a newer generation began" in str(freed)


def test_subgroup_of_one_rank_has_no_peers_and_a_subgroup_has_no_subgroups() -> None:
    def do(group: Group) -> Any:
        alone = group.subgroup([group.rank], f"only {group.rank}")
        assert alone is not None
        assert group.subgroup([(group.rank + 1) % WORLD], "another's") is None
        tensor = torch.ones(1)
        alone.all_reduce(tensor)
        alone.broadcast(tensor, 0)
        row, _ = two_axes(group)
        with pytest.raises(ConfigurationError, match="cannot be divided further"):
            row.subgroup([1, 0], "back to front")
        with pytest.raises(ConfigurationError, match=r"expected distinct ranks from 0 to 3"):
            group.subgroup([0, 4], "too many")
        for division in ([[0, 1], [2, 3]], [[0, 2], [1], [3]]):
            with pytest.raises(ConfigurationError, match=r"expected one of the division's parts"):
                group.subgroup(
                    [group.rank, (group.rank + 2) % WORLD], "another division's", division
                )
        return float(tensor), alone.rank, alone.world_size, alone.exchange(b"x")

    assert ranks(InMemoryBackend, do) == [(1.0, 0, 1, [b"x"])] * WORLD


def test_ranks_of_a_launch_have_subgroups_too_and_leave_them_without_ending_the_others() -> None:
    def do() -> float:
        net = nn.Linear(1, 1)
        shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
        group = current_session().group
        assert group is not None
        row, _ = two_axes(group)
        tensor = torch.tensor([1.0 + group.rank])
        row.all_reduce(tensor)
        return float(tensor)

    assert shoal.launch(do, world_size=WORLD) == [3.0, 3.0, 7.0, 7.0]


def test_ranks_that_sum_different_numbers_end_the_group_with_a_reason() -> None:
    def sum_as_many_as_the_rank(group: Group) -> None:
        group.all_reduce_short(torch.ones(group.rank + 1))

    ended = ranks(GlooBackend, sum_as_many_as_the_rank)
    assert all(isinstance(error, (PreconditionError, MembershipChanged)) for error in ended)
    assert "RANKS_DIVERGED" in [error.reason for error in ended]


def test_a_group_that_its_backend_has_ended_is_over() -> None:
    def end_or_sum(group: Group) -> str | None:
        with group.own_collectives("a sum") as backend:
            pass
        if group.rank == 0:
            backend.abort("a peer has gone")
        with contextlib.suppress(MembershipChanged):
            while True:  # until the rank notices that the group has ended
                group.rendezvous()
        return group.broken

    assert None not in ranks(GlooBackend, end_or_sum)
