"""Ranks of a world that stays the same, as threads of the test's process: all on one device,
connected by a backend of processes."""

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
    """Returns what `be()` gives on each rank. Raises what the first rank raises."""
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

    # Ranks go round the devices that there are: here that is one.
    with mock.patch.object(torch.cuda, "device_count", return_value=1), worlds.installed():
        outcomes = in_threads([lambda rank=rank: take_part(rank) for rank in range(world_size)])
    failures = [each for each in outcomes if isinstance(each, BaseException)]
    for failure in sorted(
        failures, key=lambda each: isinstance(each, threading.BrokenBarrierError)
    ):
        raise failure
    return outcomes
