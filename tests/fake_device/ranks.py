"""Ranks as threads with NCCL backends, each on its own device, and helpers for tests."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from shoal_worker.backends.nccl.backend import NCCLBackend
from shoal_worker.backends.nccl.ending import Ending
from torch.distributed import AllreduceOptions

from tests.fake_device.library import FakeCuda, in_threads
from tests.fake_device.machine import Machine

PATIENCE: Final = timedelta(seconds=60)
SEEDS: Final = range(12)


class ProcessEnded(BaseException):
    """Raised where the process would have ended."""


def end_process(status: int, why: str) -> NoReturn:
    raise ProcessEnded(status, why)


class Ranks:
    """Ranks as threads, each on its own device."""

    def __init__(self, size: int, seed: int = 0, *, devices: list[int] | None = None) -> None:
        self.size, self.machine = size, Machine(seed)
        self.devices = [FakeCuda(self.machine, number) for number in (devices or range(size))]

    def form(self, ranks: list[int] | None = None, **options: Any) -> list[Any]:
        """Connects these ranks. Returns their backends or the raised errors."""
        ranks = list(range(self.size)) if ranks is None else ranks
        store = dist.HashStore()
        limits = {
            name: options.pop(name)
            for name in ("limit", "finalize_limit", "connect_limit")
            if name in options
        }

        def connect(rank: int) -> NCCLBackend:
            backend = self.backend(ranks[rank], **limits)
            backend.initialize(
                rank=rank,
                world_size=len(ranks),
                store=store,
                **{"timeout": PATIENCE, "connect_timeout": PATIENCE, **options},
            )
            return backend

        return in_threads([lambda rank=rank: connect(rank) for rank in range(len(ranks))])

    def backend(
        self,
        rank: int,
        *,
        limit: timedelta = PATIENCE,
        connect_limit: timedelta = PATIENCE,
        finalize_limit: timedelta = PATIENCE,
    ) -> NCCLBackend:
        backend = NCCLBackend(self.devices[rank], connect_limit=connect_limit)
        backend._ending = Ending(
            self.devices[rank], limit=limit, finalize_limit=finalize_limit, end_process=end_process
        )
        return backend

    def run_on(self, looks: int = 400) -> None:
        """Lets the devices do everything that they can."""
        for _ in range(looks):
            self.machine.look()


def started(backend: NCCLBackend, tensor: torch.Tensor) -> dist.Work:
    return backend.process_group.allreduce([tensor], AllreduceOptions())


def outcome(call: Callable[[], Any]) -> Any:
    (answer,) = in_threads([call])
    return answer


def close(backends: list[Any]) -> None:
    formed = [backend for backend in backends if isinstance(backend, NCCLBackend)]
    in_threads([backend.shutdown for backend in formed])
    for backend in formed:
        assert isinstance(backend._device, FakeCuda)
        assert not backend._device.machine.frozen
