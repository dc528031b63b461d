"""Implements `shoal.launch`, which runs a function on several ranks without a cluster. The ranks
are threads of this process (backends/inmemory/backend.py)."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist
from shoal_common.errors import ConfigurationError, PreconditionError
from torch.distributed import HashStore

from shoal_worker.api import shutdown
from shoal_worker.backends import worlds
from shoal_worker.backends.inmemory.turns import Turns
from shoal_worker.elastic.session.worker_process import find_session

T = TypeVar("T")

_TIMEOUT: Final = timedelta(seconds=300)
_INTERRUPTED: Final = timedelta(seconds=0.5)
"""Time that ranks have, after Ctrl-C, to reach a collective, which then raises an error in them."""
_INTERRUPTED_COMPUTING: Final = timedelta(seconds=5)
"""Additional time that Ctrl-C waits for ranks that are still computing, after interrupting them."""


def launch(
    fn: Callable[..., T],
    *arguments: Any,
    world_size: int,
    backend: str = "inmemory",
    timeout: timedelta = _TIMEOUT,
) -> list[T]:
    """Runs `fn(*arguments)` on `world_size` ranks and returns their results, by rank.

    Each rank can use the public API as in a job, except that no rank joins or leaves.
    torch.distributed is initialized too (`dist.get_rank()` is the rank). Each rank has its own
    random generators, which start as copies of the caller's generators; the caller's generators do
    not change. Ranks take turns, so two runs give the same results.

    Ranks share everything else in the process. `arguments` are the same objects on all ranks, so
    each rank must create, or copy, the model that it trains. A change to a global is seen by all
    ranks. Launches that run at the same time, in several threads of the caller, share the
    generators too.

    A rank should wait for other ranks only in collectives and transfers. While ranks run,
    functional collectives cannot use the caller's own process groups.

    Args:
        fn: function that each rank runs.
        *arguments: arguments of `fn`.
        world_size: number of ranks; >= 1.
        backend: "inmemory".
        timeout: maximum duration of each wait for other ranks. After a rank has failed, also the
            maximum time for which this function waits until the other ranks have ended.

    Raises:
        ConfigurationError: a backend whose ranks are processes, a world size below 1, or a timeout
            that is not positive.
        Exception: the exception of the first rank that failed, with a note that names the rank. The
            other ranks' collectives then fail too, which ends these ranks. A second note names
            ranks that have not ended after `timeout`; they continue to run.
    """
    if backend != "inmemory":
        raise ConfigurationError(
            f"launch(backend={backend!r}): launch runs ranks as threads, but this backend needs "
            "processes; start them with `shoal run`, or use 'inmemory'"
        )
    if world_size < 1:
        raise ConfigurationError(f"launch(world_size={world_size}): expected at least 1")
    if timeout <= timedelta(0):
        raise ConfigurationError(f"launch(timeout={timeout}): expected more than 0 s")
    with worlds.installed():
        ranks = _Ranks(lambda: fn(*arguments), world_size, timeout)
        return ranks.run()


class _Ranks:
    """Starts the threads that are the ranks of one launch, and waits for them."""

    def __init__(self, fn: Callable[[], Any], size: int, timeout: timedelta) -> None:
        self._fn, self._size, self._timeout = fn, size, timeout
        self._store = HashStore()
        self._turns = Turns(size)
        self._results: list[Any] = [None] * size
        self._failed: tuple[int, BaseException] | None = None
        """The rank that failed first, and its error."""
        self._failing = threading.Event()
        self._ended = [threading.Event() for _ in range(size)]
        self._threads = [
            threading.Thread(target=self._be, args=(rank,), name=f"shoal-rank-{rank}", daemon=True)
            for rank in range(size)
        ]

    def run(self) -> list[Any]:
        with self._turns.generators_kept():
            try:
                for thread in self._threads:
                    thread.start()
                running = self._wait()
            except BaseException as interruption:  # Ctrl-C
                self._interrupt(interruption)
                raise
        if self._failed is None:
            return self._results
        rank, error = self._failed
        error.add_note(f"This was raised by rank {rank} of {self._size} in shoal.launch.")
        if running:
            names = ", ".join(self._threads[one].name for one in running)
            error.add_note(f"Still running {self._timeout.total_seconds():g} s later: {names}.")
        raise error

    def _wait(self) -> list[int]:
        """Waits until all ranks have ended, or until one has failed and `timeout` has passed since.
        Returns the ranks that are still running."""
        for ended in self._ended:
            while not ended.is_set() and not self._failing.is_set():
                ended.wait(0.05)
        return self._still_running(self._timeout)

    def _still_running(self, limit: timedelta) -> list[int]:
        """Waits until all ranks have ended, for at most `limit` in total. Returns the ranks that
        are still running."""
        deadline = time.monotonic() + limit.total_seconds()
        running = []
        for rank, ended in enumerate(self._ended):
            if self._threads[rank].ident is None:  # Ctrl-C came before the thread was started
                continue
            # If Ctrl-C interrupts a `join`, the thread counts as finished although it may still be
            # running. Therefore, a thread that may run for a long time is not joined here.
            if ended.wait(max(0.0, deadline - time.monotonic())):
                self._threads[rank].join()
            else:
                running.append(rank)
        return running

    def _interrupt(self, interruption: BaseException) -> None:
        """Ends all ranks, including ranks that are computing. If a rank were still inside torch
        when the interpreter shuts down, the process would end with SIGABRT."""
        self._turns.end_all(f"the launch was interrupted: {type(interruption).__name__}")
        for rank in self._still_running(_INTERRUPTED):
            ident = ctypes.c_ulong(self._threads[rank].ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(type(interruption)))
        self._still_running(_INTERRUPTED_COMPUTING)

    def _be(self, rank: int) -> None:
        try:
            self._run(rank)
        except BaseException as error:  # ending the rank failed or was interrupted
            self._failed = self._failed or (rank, error)
            self._failing.set()
        finally:
            self._ended[rank].set()

    def _run(self, rank: int) -> None:
        seat = worlds.Seat(
            rank=rank, world_size=self._size, store=self._store, timeout=self._timeout
        )
        try:
            with worlds.entered(seat):
                try:
                    self._turns.begin(rank)
                    dist.init_process_group(
                        "shoal_inmemory",
                        store=self._store,
                        rank=rank,
                        world_size=self._size,
                        timeout=self._timeout,
                    )
                    self._results[rank] = self._fn()
                    if (session := find_session()) is not None:
                        shutdown(timeout=self._timeout)
                        if session.missed is not None:
                            raise PreconditionError(session.missed)
                except BaseException as error:  # an exit, too, ends all ranks; the launch raises it
                    if self._failed is None:
                        self._failed = rank, error
                    self._turns.end_all(f"rank {rank} failed: {type(error).__name__}: {error}")
                    self._failing.set()
                    session = find_session()
                    if session is not None:
                        session.close(failed=str(error))
        finally:
            self._turns.finish(rank)
