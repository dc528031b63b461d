"""Connecting the process group of a generation, and what its parts are connected with later.

Threads: the training thread connects. What `announce` is given may be aborted from any thread, and frees it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from shoal_common.errors import ConfigurationError, MembershipChanged, ShoalError

from shoal_worker.backends.base import CommunicationBackend, Waits
from shoal_worker.elastic.generation import Generation
from shoal_worker.elastic.group import Group, Opening, brief
from shoal_worker.elastic.waiting_lines import EVERY_S, WaitingLines
from shoal_worker.store.errors import StoreTimeoutError
from shoal_worker.store.redis_store import RedisStore

_MOST_NAMED: Final = 5


class Forming:
    """A generation being connected: can be given up from another thread."""

    def __init__(self, generation: Generation, store: RedisStore | None) -> None:
        self.generation = generation
        self._store = store

    def abort(self, reason: str) -> None:
        """Makes the connecting thread fail at once."""
        if self._store is not None:
            self._store.abort(reason)


def connect(
    generation: Generation,
    *,
    make_backend: Callable[[], CommunicationBackend],
    store_url: str,
    prefix: str,
    host: str,
    arrival_timeout: timedelta,
    connect_timeout: timedelta,
    collective_timeout: timedelta,
    announce: Callable[[Forming], None],
    waits: Waits,
) -> Group:
    """Connects this member to the others of `generation` over a store prefix that nobody used before.

    Waits first until all have arrived: peers may still be building their models, or finishing a forward pass. Only then does it connect,
    with a short deadline. `announce` gets the handle by which another thread can give up the attempt, before anything blocks. `waits` notes
    that this rank waits; every ten seconds a line says for whom.

    Raises:
        MembershipChanged: given up, a peer went away, not all arrived within `arrival_timeout` or connected within `connect_timeout`.
        ConfigurationError: the backend does not work here, nor would it in a later generation.
    """
    if generation.world_size == 1:
        announce(Forming(generation, None))
        return Group(generation, None, None)
    opening = Opening(
        make_backend=make_backend,
        store=lambda name: RedisStore(store_url, f"{prefix}:{name}", timeout=connect_timeout),
        hostname=host,
        connect_timeout=connect_timeout,
        collective_timeout=collective_timeout,
    )
    store = RedisStore(store_url, prefix, timeout=connect_timeout)
    announce(Forming(generation, store))
    try:
        with waits.of(f"generation {generation.number} to form"):
            _arrive(generation, store, arrival_timeout)
            backend = make_backend()
            opening.initialize(backend, generation, store)
    except (MembershipChanged, ConfigurationError):
        raise
    except (RuntimeError, ShoalError) as error:
        raise MembershipChanged(f"generation {generation.number} did not form: {brief(error)}") from error
    return Group(generation, backend, store, opening)


def _arrive(generation: Generation, store: RedisStore, timeout: timedelta) -> None:
    """Returns when all ranks have come. Raises StoreTimeoutError when some have not in time, naming them."""
    deadline, lines = time.monotonic() + timeout.total_seconds(), WaitingLines()
    store.set(_arrival(generation.rank), b"1")
    if store.add("arrived", 1) == generation.world_size:
        store.set("complete", b"1")
    while True:
        left_s = deadline - time.monotonic()
        try:
            store.wait(["complete"], timedelta(seconds=max(0.001, min(EVERY_S, left_s))))
        except StoreTimeoutError as error:
            if left_s <= EVERY_S:
                raise StoreTimeoutError(f"waited {timeout.total_seconds():g} s for {_absent(generation, store)}") from error
            lines.say(f"generation {generation.number} to form", lambda: f"not there yet: {_absent(generation, store)}")
        else:
            return


def _absent(generation: Generation, store: RedisStore) -> str:
    there = set(store.list_keys())
    absent = [f"rank {peer.rank} ({peer.host})" for peer in generation.peers if _arrival(peer.rank) not in there]
    more = len(absent) - _MOST_NAMED
    return (", ".join(absent[:_MOST_NAMED]) or "nobody") + (f" and {more} more" if more > 0 else "")


def _arrival(rank: int) -> str:
    return f"arrived/{rank}"
