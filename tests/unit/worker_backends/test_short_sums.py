"""Sums of a few numbers over connections of their own. The ranks are threads here."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from shoal_common.errors import PreconditionError
from shoal_worker.backends.gloo.short_sums import Door, ShortSums

_LONG = timedelta(seconds=60)


@contextlib.contextmanager
def connected(
    size: int, timeout: timedelta = _LONG
) -> Iterator[tuple[list[ShortSums], ThreadPoolExecutor]]:
    """Connects `size` ranks and yields them with an executor that has a thread for each."""
    sums = [ShortSums("127.0.0.1", rank, size) for rank in range(size)]
    doors = {rank: Door.parse(str(one.door)) for rank, one in enumerate(sums)}
    with ThreadPoolExecutor(size) as threads:
        try:
            for done in [
                threads.submit(one.connect, doors, deadline=time.monotonic() + 60, timeout=timeout)
                for one in sums
            ]:
                done.result(60)
            yield sums, threads
        finally:
            for one in sums:
                one.close()


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 9])
def test_all_ranks_get_the_sum_in_rank_order(size: int) -> None:
    given = (
        torch.rand(size, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
        * 1e9
    )
    expected = given[0].clone()
    for row in given[1:]:
        expected += row
    with connected(size) as (sums, threads):
        for _ in range(5):
            mine = [row.clone() for row in given]
            for done in [
                threads.submit(one.all_reduce, tensor)
                for one, tensor in zip(sums, mine, strict=True)
            ]:
                done.result(60)
            for tensor in mine:
                assert torch.equal(tensor, expected)
            summing = [
                threads.submit(one.sum_numbers, array("d", row.tolist()))
                for one, row in zip(sums, given, strict=True)
            ]
            assert [done.result(60) for done in summing] == [expected.tolist()] * size


def test_a_rank_may_be_a_sum_ahead() -> None:
    """A rank that has its result may begin the next sum while other ranks still wait for theirs."""
    with connected(5) as (sums, threads):

        def three_sums(one: ShortSums) -> list[float]:
            totals = []
            for number in (1.0, 10.0, 100.0):
                tensor = torch.tensor([number])
                one.all_reduce(tensor)
                totals.append(float(tensor))
            return totals

        for done in [threads.submit(three_sums, one) for one in sums]:
            assert done.result(60) == [5.0, 50.0, 500.0]


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(5)], ids=["fewer", "more"])
def test_ranks_that_sum_different_things_are_reported(other: torch.Tensor) -> None:
    with connected(2) as (sums, threads):
        first, second = (
            threads.submit(sums[0].all_reduce, torch.ones(4)),
            threads.submit(sums[1].all_reduce, other),
        )
        for done in (first, second):
            with pytest.raises(
                PreconditionError, match=r"sent (12|16|20) bytes for sum 1, but this rank expected"
            ) as caught:
                done.result(60)
            assert caught.value.reason == "RANKS_DIVERGED"


def test_departed_rank_ends_the_sum() -> None:
    with connected(2) as (sums, threads):
        waiting = threads.submit(sums[0].all_reduce, torch.ones(4))
        sums[1].close()
        with pytest.raises(OSError, match=r"closed|reset|pipe"):
            waiting.result(60)


def test_a_rank_that_does_not_answer_is_named_after_the_timeout() -> None:
    with (
        connected(2, timedelta(milliseconds=200)) as (sums, _),
        pytest.raises(TimeoutError, match="Timed out waiting 200ms for rank 1,"),
    ):
        sums[0].all_reduce(torch.ones(4))


def test_absent_rank_is_named() -> None:
    sums = [ShortSums("127.0.0.1", rank, 3) for rank in range(3)]
    doors = {rank: one.door for rank, one in enumerate(sums)}
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not connect"):
        sums[0].connect(doors, deadline=time.monotonic() + 0.2, timeout=_LONG)
    for one in sums:
        one.close()


def test_rank_that_identifies_itself_late_is_accepted() -> None:
    sums = [ShortSums("127.0.0.1", rank, 2) for rank in range(2)]
    with (
        ThreadPoolExecutor(2) as threads,
        socket.create_connection((sums[0].door.host, sums[0].door.port)) as late,
    ):
        doors = {0: sums[0].door, 1: sums[1].door}
        first = threads.submit(
            sums[0].connect, doors, deadline=time.monotonic() + 60, timeout=_LONG
        )
        hello = struct.pack("<16sI", sums[0].door.token.encode(), 1)
        for part in (hello[:7], hello[7:]):
            assert not first.done()
            # the delay is what is tested: a rank that stalls after it has connected
            time.sleep(0.6)
            late.sendall(part)
        first.result(60)
    for one in sums:
        one.close()


def test_connecting_can_be_given_up_at_once() -> None:
    sums = [ShortSums("127.0.0.1", rank, 2) for rank in range(2)]
    doors = {rank: one.door for rank, one in enumerate(sums)}
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(
            sums[0].connect, doors, deadline=time.monotonic() + 60, timeout=_LONG
        )
        sums[0].shut_down()
        with pytest.raises(OSError, match="abandoned"):
            waiting.result(10)
    for one in sums:
        one.close()


def _says_nothing(door: socket.socket) -> None:
    pass


def _knows_no_token(door: socket.socket) -> None:
    door.sendall(b"x" * 20)


def _goes_away(door: socket.socket) -> None:
    door.sendall(b"GET /")
    door.close()


@pytest.mark.parametrize("behaviour", [_says_nothing, _knows_no_token, _goes_away])
def test_connecting_strangers_block_nobody(behaviour: Callable[[socket.socket], None]) -> None:
    sums = [ShortSums("127.0.0.1", rank, 2) for rank in range(2)]
    doors = {rank: one.door for rank, one in enumerate(sums)}
    with (
        ThreadPoolExecutor(2) as threads,
        socket.create_connection((doors[0].host, doors[0].port)) as stranger,
    ):
        behaviour(stranger)
        for done in [
            threads.submit(one.connect, doors, deadline=time.monotonic() + 60, timeout=_LONG)
            for one in sums
        ]:
            done.result(60)
        tensors = [torch.tensor([1.0]), torch.tensor([2.0])]
        for done in [
            threads.submit(one.all_reduce, tensor)
            for one, tensor in zip(sums, tensors, strict=True)
        ]:
            done.result(60)
    assert tensors == [torch.tensor([3.0])] * 2
    for one in sums:
        one.close()


def test_a_forked_child_keeps_no_connection_open() -> None:
    """A forked child closes its copies of the connections. Otherwise peers would not notice the
    rank's death while its DataLoader workers live."""
    with connected(2) as (sums, threads):
        release, ready = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            os.write(ready[1], b"x")
            os.read(release[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        waiting: Any = threads.submit(sums[0].all_reduce, torch.ones(4))
        sums[1].close()
        with pytest.raises(OSError, match=r"closed|reset|pipe"):
            waiting.result(10)
        os.write(release[1], b"x")
        os.waitpid(child, 0)
        for end in (*release, *ready):
            os.close(end)
