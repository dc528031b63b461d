"""Groups that change their ranks through torch's `_reconfigure`: collectives in flight end, and
write nothing afterwards.

With a torch that lacks the API (before 2.14), the same tasks call the group's methods themselves.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_worker.backends.python_group import NamedGroup
from shoal_worker.store.redis_store import RedisStore

from tests.integration.worker_backends.reconfigure_tasks import HAS_API
from tests.ranks.processes import Rank

_TASKS = "tests.integration.worker_backends.reconfigure_tasks"
_LONG_S = 30.0
"""Much longer than a reconfiguration takes, and much shorter than the groups' timeout."""

needs_api = pytest.mark.skipif(
    not HAS_API,
    reason=f"torch has _reconfigure from 2.14 on, and {torch.__version__} is installed",
)

Take = Callable[[int], list[Rank]]


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


@pytest.fixture
def begin(take_ranks: Take, server: dist.TCPStore) -> Callable[..., list[Rank]]:
    """Starts a task on the given number of ranks."""

    def start(task: str, count: int, url: str = f"tcp:{server.port}") -> list[Rank]:
        ranks = take_ranks(count)
        for number, rank in enumerate(ranks):
            rank.start(f"{_TASKS}:{task}", url=url, prefix="test", rank=number)
        return ranks

    return start


def results(ranks: list[Rank]) -> list[Any]:
    return [rank.result() for rank in ranks]


def signals(server: dist.TCPStore) -> dist.PrefixStore:
    return dist.PrefixStore("test/signals", server)


def check_shrinking_and_growing(found: list[list[Any]]) -> None:
    for rank, (before, three, *fewer, again, alone, reversed_) in enumerate(found):
        assert "no ranks yet" in before
        assert three == again == [rank, 3, 6.0]
        assert fewer == ([] if rank == 1 else [[rank // 2, 2, 3.0]])
        assert alone == [0, 1, 1.0]
        assert reversed_ == [2 - rank, 3, 6.0]


def test_ranks_leave_and_return(begin: Callable[..., list[Rank]]) -> None:
    check_shrinking_and_growing(results(begin("shrink_and_grow", 3)))


def test_ranks_can_rendezvous_at_redis(begin: Callable[..., list[Rank]], redis_url: str) -> None:
    check_shrinking_and_growing(results(begin("shrink_and_grow", 3, url=redis_url)))


def test_ranks_reconfigure_twice_in_a_row_and_as_a_set(begin: Callable[..., list[Rank]]) -> None:
    found = results(begin("reconfigure_twice", 2))
    assert [one[0] for one in found] == [[0, 2, 3.0], [1, 2, 3.0]]
    assert sorted(one[1] for one in found) == [[0, 2, 3.0], [1, 2, 3.0]]
    assert sorted(one[2] for one in found) == [[0, 2.0], [1, 1.0]]


def test_collective_left_in_flight_by_a_stopped_rank_writes_nothing_after_a_reconfigure(
    begin: Callable[..., list[Rank]], server: dist.TCPStore
) -> None:
    ranks = begin("leave_in_flight", 3)
    ranks[2].event("to be stopped")
    ranks[2].send_signal(signal.SIGSTOP)
    signals(server).set("stopped", "")
    for rank in ranks[:2]:
        rank.event("reused")
    signals(server).set("continued", "")
    ranks[2].send_signal(signal.SIGCONT)
    *survivors, late = results(ranks)
    for number, survivor in enumerate(survivors):
        assert survivor["changed"] == [0, 0, 0]
        assert all("reconfigured with uuid 2" in failure for failure in survivor["failures"])
        assert survivor["took_s"] < _LONG_S
        assert survivor["small"] == [number, 2, 3.0]
        assert survivor["found"] == [number, 3, 6.0]
    assert late["late"]
    assert late["found"] == [2, 3, 6.0]


def test_handle_of_a_dead_rank_fails_the_reconfigure_and_the_next_one_omits_it(
    begin: Callable[..., list[Rank]],
) -> None:
    ranks = begin("include_a_dead_rank", 3)
    for rank in ranks:
        rank.event("summing")
    ranks[2].end()
    for number, found in enumerate(results(ranks[:2])):
        assert found["failure"]
        assert found["took_s"] < _LONG_S
        assert "ranks [2] did not arrive" in found["refusal"]
        assert "reconfigure with uuid 2 failed" in found["between"]
        assert found["found"] == [number, 2, 3.0]


def test_ranks_continue_after_the_timeout_of_a_collective(begin: Callable[..., list[Rank]]) -> None:
    found = results(begin("exceed_the_timeout", 2))
    assert found[0]["failure"]
    assert [one["found"] for one in found] == [[0, 2, 3.0], [1, 2, 3.0]]


def test_an_abort_ends_a_collective_and_a_reconfigure(begin: Callable[..., list[Rank]]) -> None:
    found = results(begin("abort_and_continue", 2))
    assert "was aborted" in found[0]["aborted"]
    assert "was aborted" in found[0]["waiting"]
    assert [one["found"] for one in found] == [[0, 2, 3.0], [1, 2, 3.0]]


def test_invalid_calls_leave_the_group_unchanged(begin: Callable[..., list[Rank]]) -> None:
    for number, (used, foreign, twice, found) in enumerate(results(begin("make_invalid_calls", 2))):
        assert "already used" in used
        assert "that of this process" in foreign
        assert "expected distinct handles" in twice
        assert found == [number, 2, 3.0]


@needs_api
def test_ddp_averages_over_the_present_ranks(begin: Callable[..., list[Rank]]) -> None:
    assert results(begin("average_with_ddp", 3)) == [[3.0], [3.0], []]


@needs_api
def test_group_created_without_reconfiguration_reports_no_support(redis_url: str) -> None:
    torchs: Any = dist
    store = RedisStore(redis_url, "plain")
    dist.init_process_group("shoal_gloo", store=store, rank=0, world_size=1)
    try:
        assert isinstance(dist.group.WORLD, NamedGroup)
        assert not torchs._supports_reconfigure()
    finally:
        dist.destroy_process_group()
