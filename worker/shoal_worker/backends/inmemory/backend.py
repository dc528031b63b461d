"""Ranks as threads of one process, for notebooks, tests and debugging: `shoal.launch(fn, world_size=4)`.

Results do not depend on timing: reductions go by rank, and ranks that `launch` starts take turns (turns.py). A rank that fails
ends the group for all, with its reason. It is not for speed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar, Final

import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions
from torch.distributed.distributed_c10d import Store

from shoal_worker.backends.base import CommunicationBackend
from shoal_worker.backends.errors import GroupEndedError
from shoal_worker.backends.inmemory.group import InMemoryGroup
from shoal_worker.backends.inmemory.room import Room, room_for

NAME: Final = "shoal_inmemory"


class InMemoryBackend(CommunicationBackend):
    """A group of threads. The store only says which threads belong together: a `torch.distributed.HashStore` will do."""

    name: ClassVar[str] = "inmemory"
    averages_natively: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._room: Room | None = None

    @property
    def is_initialized(self) -> bool:
        """Whether collectives can be issued: initialized, and not over for any rank."""
        return super().is_initialized and self._room is not None and self._room.ended is None

    def _connect(self, store: Store, timeout: timedelta, connect_timeout: timedelta, hostname: str | None) -> dist.ProcessGroup:
        room = self._room = room_for(store, self.rank, self.world_size, "inmemory")
        if self._reason is not None:
            room.end(GroupEndedError(self._reason))
        group = InMemoryGroup(room, self.rank, timeout)
        room.await_all(self.rank, connect_timeout)
        return group

    def shutdown(self) -> None:
        """This rank leaves, without disturbing those who need it no more. Idempotent."""
        if self._room is not None:
            self._room.leave(self.rank, "has shut its backend down")
        with self._lock:
            self._reason = self._reason or f"backend {self.name!r} was shut down"
        self._release()

    def _break(self) -> None:
        room, reason = self._room, self._reason
        assert reason is not None
        if room is not None:
            room.end(GroupEndedError(reason))

    def _release(self) -> None:
        self._process_group = None

    def _is_broken(self, error: RuntimeError) -> bool:
        return False  # the group raises what it means


def register() -> None:
    """Makes torch know the backend "shoal_inmemory"."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: _DistributedBackendOptions, _: Any) -> InMemoryGroup:
    """Called by torch for the default group and each new_group. Waits for the others with the first collective."""
    room = room_for(options.store, options.group_rank, options.group_size, options.group_id)
    return InMemoryGroup(room, options.group_rank, options.timeout)
