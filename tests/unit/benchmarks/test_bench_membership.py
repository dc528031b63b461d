"""The watcher of the loop on torch's `_reconfigure`, over real connections."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from benchmarks.workers.membership import Generation, Membership, Watcher, listen

_WAIT_S = 30.0


@pytest.fixture
def port() -> Iterator[int]:
    """Port of a watcher that waits for three workers, served by a thread."""
    listener = listen(0)
    served = Watcher(listener, store_port=1234, ranks=3)
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            served.turn(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    yield int(listener.getsockname()[1])
    over.set()
    thread.join(_WAIT_S)
    served.close()


@pytest.fixture
def three(port: int) -> Iterator[list[Membership]]:
    """The members of the first generation."""
    workers = [Membership(port, timeout_s=_WAIT_S) for _ in range(3)]
    for worker in workers:
        worker.ready()
    for worker in workers:
        assert worker.wait_for_newer(0) == Generation(number=1, members=(0, 1, 2))
    yield workers
    for worker in workers:
        worker.close()


def test_workers_receive_the_stores_port_and_distinct_numbers(three: list[Membership]) -> None:
    assert [(worker.store_port, worker.member) for worker in three] == [
        (1234, 0),
        (1234, 1),
        (1234, 2),
    ]


def test_closed_connection_forms_a_generation_without_its_worker(
    three: list[Membership],
) -> None:
    three[1].close()
    for worker in (three[0], three[2]):
        assert worker.wait_for_newer(1) == Generation(number=2, members=(0, 2))


def test_a_worker_joins_once_it_is_ready(port: int, three: list[Membership]) -> None:
    joiner = Membership(port, timeout_s=_WAIT_S)
    assert [worker.newest() for worker in three] == [Generation(number=1, members=(0, 1, 2))] * 3
    joiner.ready()
    for worker in (*three, joiner):
        assert worker.wait_for_newer(1) == Generation(number=2, members=(0, 1, 2, 3))
    joiner.close()


def test_failed_generation_is_followed_once_by_one_of_the_same_members(
    three: list[Membership],
) -> None:
    three[0].failed(1)
    assert three[1].wait_for_newer(1) == Generation(number=2, members=(0, 1, 2))
    three[2].failed(1)  # of a generation that is over
    three[1].close()
    assert three[0].wait_for_newer(2) == Generation(number=3, members=(0, 2))


def test_wait_for_a_generation_times_out(three: list[Membership]) -> None:
    with pytest.raises(TimeoutError, match="a generation after 1"):
        three[0].wait_for_newer(1, within_s=0.05)
