"""A Gloo work on device tensors is ordered correctly with the kernels before and after it, no
matter which thread completes it. No device is needed: the test records the calls to the streams."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from shoal_worker.backends.base import GroupEndedError
from shoal_worker.backends.gloo.on_devices import ArrivingElsewhere, order_of
from shoal_worker.backends.gloo.works import InterruptibleWork
from shoal_worker.backends.waits import Waits


class Written:
    """Records the calls to an order."""

    def __init__(self) -> None:
        self.what: list[str] = []

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        self.what.append("begin")
        yield
        self.what.append("end")

    def come_after(self) -> None:
        self.what.append(
            "after, in the caller"
            if threading.current_thread() is threading.main_thread()
            else "after, in another thread"
        )


def native(done: Callable[[], bool]) -> Any:
    """Returns a Gloo work that is complete once `done` returns True."""
    future: torch.futures.Future[list[int]] = torch.futures.Future()

    def wait(timeout: timedelta | None = None) -> bool:
        if not done():
            raise RuntimeError("Operation timed out!")
        if not future.done():
            future.set_result([])
        return True

    return SimpleNamespace(wait=wait, is_completed=done, get_future=lambda: future)


def work_of(gloo: Any, order: Written, *, finishes: bool = True) -> InterruptibleWork:
    owner = SimpleNamespace(
        waits=Waits(), finished=lambda work: None, loss=lambda name, error: "lost"
    )
    return InterruptibleWork(
        "reduce_scatter",
        gloo,
        cast(Any, owner),
        (lambda: order.what.append("finish")) if finishes else None,
        order,
    )


@pytest.mark.parametrize("finishes", [True, False])
@pytest.mark.parametrize(
    "followed", [False, True], ids=["by the waiting thread", "by another thread"]
)
def test_each_wait_orders_the_callers_work_after_the_collective(
    finishes: bool, followed: bool
) -> None:
    order = Written()
    gloo = native(lambda: True)
    work = work_of(gloo, order, finishes=finishes)
    if followed:
        work.follow()
        thread = threading.Thread(target=gloo.wait)
        thread.start()
        thread.join()
    assert work.wait()
    assert work.wait()
    computed = ["begin", "finish", "end"] if finishes else ["begin", "end"]
    assert order.what == [*computed, "after, in the caller", "after, in the caller"]


def test_lost_collective_leaves_no_order() -> None:
    order = Written()
    work = work_of(native(lambda: False), order)
    work.end("a peer is gone")
    with pytest.raises(GroupEndedError, match="a peer is gone"):
        work.wait()
    assert order.what == []


def test_tensors_in_host_memory_need_no_order() -> None:
    assert order_of(([torch.ones(1)], None)) is None
    assert order_of(()) is None


def test_message_to_another_device_is_copied_there_once_when_awaited() -> None:
    host, into = torch.ones(2), torch.zeros(2)
    transfer = SimpleNamespace(wait=lambda timeout: True, source_rank=lambda: 3)
    work = ArrivingElsewhere(transfer, host, into)
    assert not work.is_completed()
    assert work.wait()
    assert into.tolist() == [1.0, 1.0]
    host.fill_(5)
    assert work.wait()
    assert work.is_completed()
    assert into.tolist() == [1.0, 1.0]
    assert work.source_rank() == 3
