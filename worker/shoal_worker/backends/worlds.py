"""Gives each thread that is a rank its own torch.distributed world, which the threads that it
starts share.

torch keeps its default group and its registry of groups in one global per process. While threads
are ranks, that global forwards to the calling thread's world; other threads continue to use the
process's world. The C++ registry in which functional collectives look up groups is made
thread-local as well, by a switch that torch provides. The DeviceMeshes of two ranks are made
unequal, because DTensor caches by mesh.

A thread started by a rank, such as a thread that saves a checkpoint, uses the rank's world, as it
would if the rank were a separate process, but not the rank's C++ registry. A thread shared by
several ranks, such as a thread of a global executor, uses the world of the rank that started it.

Threads: `installed` may be nested and used in several threads; the rank's own thread uses
`entered`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import device_mesh
from torch.distributed.distributed_c10d import Store

from shoal_worker.torch_internals import _set_thread_isolation_mode, c10d

_lock = threading.Lock()
_installed: list[contextlib.ExitStack] = []
_users = 0
_thread = threading.local()
_identities: Final = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank's place in a fixed set of ranks: a launch, or MPI's world."""

    rank: int
    world_size: int
    store: Store
    """Store shared by all ranks, if the backend needs one. In a launch, waiting on the store would
    keep the rank's turn, so it may be used only for calls that return immediately."""
    timeout: timedelta
    """Time limit of a wait for other ranks."""
    backend: str = "inmemory"
    """Name of the backend that connects the ranks."""


class World:
    """torch's record of process groups for one rank, with the attributes of c10d's own world."""

    def __init__(self) -> None:
        self.identity = next(_identities)
        """Identifier that, unlike a thread's identifier, is never reused."""
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, Any] = {}
        self.pg_group_ranks: dict[Any, Any] = {}
        self.pg_backend_config: dict[Any, Any] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.pg_flight_recorder_hooks: dict[Any, Any] = {}
        self.comms: list[Any] = []
        # attributes of a rank in addition to torch's
        self.seat: Seat | None = None
        self.session: Any = None
        """Shoal's session, stored here so that the threads started by the rank find it."""


class WorldOfThread:
    """Forwards each attribute access to the calling thread's world or, if the thread belongs to no
    rank, to the process's world."""

    def __init__(self, processes: Any) -> None:
        object.__setattr__(self, "_processes", processes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._found(), name, value)

    def _found(self) -> Any:
        return own_world() or object.__getattribute__(self, "_processes")


def own_world() -> World | None:
    """Returns the world of the calling thread's rank; None if the thread belongs to no rank."""
    world: World | None = getattr(_thread, "world", None)
    return world


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Context in which threads can be ranks: torch's global record of process groups forwards to a
    separate record for each rank."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _installed.append(_install())
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _installed.pop().close()


@contextlib.contextmanager
def entered(seat: Seat | None = None) -> Iterator[None]:
    """Context in which the calling thread is a rank. On exit, the thread leaves all its groups.
    `seat`: the rank's place in a launch, if any."""
    # Backward passes run on this thread, even for CUDA tensors, so that collectives in autograd
    # hooks find this world.
    with installed(), torch.autograd.set_multithreading_enabled(False):
        world = _thread.world = World()
        world.seat = seat
        try:
            yield
        finally:
            if c10d.is_initialized():
                c10d.destroy_process_group()
            _thread.world = None


def _install() -> contextlib.ExitStack:
    undo = contextlib.ExitStack()
    processes = c10d._world
    c10d._world = WorldOfThread(processes)  # type: ignore[assignment]
    undo.callback(setattr, c10d, "_world", processes)
    _set_thread_isolation_mode(True)
    undo.callback(_set_thread_isolation_mode, False)
    original = device_mesh.DeviceMesh.__init__

    @functools.wraps(original)
    def initialize(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        world = own_world()
        if world is not None:
            self._thread_id = world.identity

    device_mesh.DeviceMesh.__init__ = initialize  # type: ignore[method-assign]
    undo.callback(setattr, device_mesh.DeviceMesh, "__init__", original)
    start = threading.Thread.start

    @functools.wraps(start)
    def start_in_world(self: threading.Thread) -> None:
        world, run = own_world(), self.run
        if world is not None:

            def run_in_world() -> None:
                _thread.world = world
                run()

            self.run = run_in_world  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = start_in_world  # type: ignore[method-assign]
    undo.callback(setattr, threading.Thread, "start", start)
    # each call to init_process_group wraps it again
    undo.callback(setattr, sys, "excepthook", sys.excepthook)
    return undo
