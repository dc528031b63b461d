"""Ranks of a fixed world as threads of the test's process: all use one device and are connected by
a backend for processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from shoal_worker.api import shutdown
from shoal_worker.backends import worlds

from tests.fake_device.library import in_threads, leaving_together

_TIMEOUT = timedelta(seconds=120)


def together(be: Callable[[], Any], *, world_size: int, backend: str = "gloo") -> list[Any]:
    """Runs `be()` on each rank and returns the results. Raises the error of the first rank that
    failed."""
    store, done = dist.HashStore(), threading.Barrier(world_size)

    def take_part(rank: int) -> Any:
        with worlds.entered(
            worlds.Seat(
                rank=rank, world_size=world_size, store=store, timeout=_TIMEOUT, backend=backend
            )
        ):
            with leaving_together(done, _TIMEOUT):
                result = be()
            shutdown()
            return result

    # Ranks are assigned to the existing devices in turn. Here, there is one.
    with mock.patch.object(torch.cuda, "device_count", return_value=1), worlds.installed():
        outcomes = in_threads([lambda rank=rank: take_part(rank) for rank in range(world_size)])
    failures = [each for each in outcomes if isinstance(each, BaseException)]
    for failure in sorted(
        failures, key=lambda each: isinstance(each, threading.BrokenBarrierError)
    ):
        raise failure
    return outcomes
