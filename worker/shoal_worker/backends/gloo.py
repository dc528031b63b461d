"""Gloo: collectives over TCP, for CPU clusters, with an abort that frees every waiting rank within milliseconds.

Gloo's own abort and shutdown do nothing, and a rank that waits for a stuck peer waits out its whole timeout. Here an abort shuts down the
group's own connections (sockets.py), which fails every pending operation here at once. At the peers it fails what waits for this rank at
once, and the rest when their watch has noticed (sockets.GRACE_S). The same happens when a rank dies. So a group ends for all of its ranks
when it ends for one; a rank that leaves in good order does so after a collective that all take part in.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from datetime import timedelta
from typing import ClassVar, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, PrefixStore, Store

from shoal_worker.backends import reaper
from shoal_worker.backends.base import CommunicationBackend
from shoal_worker.backends.forming import FormingGroup, GlooGroup
from shoal_worker.backends.interface import address_for
from shoal_worker.backends.sockets import GroupSockets
from shoal_worker.store.redis_store import RedisStore

_NUMBERS: Final = itertools.count()


class GlooBackend(CommunicationBackend):
    """A `ProcessGroupGloo` of its own, on CPU tensors (and CUDA tensors, through host memory)."""

    name: ClassVar[str] = "gloo"
    averages_natively: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._forming: FormingGroup | None = None
        self._sockets: GroupSockets | None = None
        self._store: Store | None = None
        """Kept for the group, which holds only the C++ half of a store written in Python."""

    def _connect(self, store: Store, timeout: timedelta, connect_timeout: timedelta, hostname: str | None) -> dist.ProcessGroup:
        forming = FormingGroup(
            store, self.rank, self.world_size, hostname=hostname or address_for(store), connect_timeout=connect_timeout, timeout=timeout
        )
        self._forming = forming
        if self._reason is not None:
            forming.give_up(self._reason)
        try:
            with store.on_abort(forming.give_up) if isinstance(store, RedisStore) else contextlib.nullcontext():
                group = forming.wait()
        finally:
            self._forming = None
        self._sockets, self._store = group.sockets, store
        weakref.finalize(self, group.sockets.close)
        reference = weakref.ref(self)

        def lost(what: str) -> None:
            backend = reference()
            if backend is not None:
                backend.abort(what)

        group.sockets.watch(lost)
        return _as_process_group(store, self.rank, self.world_size, group)

    def _break(self) -> None:
        forming, sockets, reason = self._forming, self._sockets, self._reason
        if forming is not None and reason is not None:
            forming.give_up(reason)
        if sockets is not None:
            sockets.shut_down()

    def _release(self) -> None:
        sockets = self._sockets
        references: list[object] = [self._process_group, self._store]
        self._process_group = self._sockets = self._store = None
        if sockets is not None:
            sockets.close()
        if any(references):
            reaper.drop(references)

    def _is_broken(self, error: RuntimeError) -> bool:
        return "gloo/transport" in str(error)


def _as_process_group(store: Store, rank: int, world_size: int, group: GlooGroup) -> dist.ProcessGroup:
    """What torch's parallel code takes; made as torch's new_group does, but known to nobody else in the process."""
    process_group = dist.ProcessGroup(PrefixStore("group", store), rank, world_size)
    kind = dist.ProcessGroup.BackendType.GLOO
    process_group._set_default_backend(kind)
    process_group._register_backend(torch.device("cpu"), kind, group.backend)
    if torch.cuda.is_available():
        process_group._register_backend(torch.device("cuda"), kind, group.backend)
    process_group._set_group_name(GroupName(f"shoal_gloo_{next(_NUMBERS)}"))
    return process_group
