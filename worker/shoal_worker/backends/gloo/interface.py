"""Which address of this host peers can reach it under, without asking what its hostname resolves to (often 127.0.1.1, or nothing)."""

from __future__ import annotations

import socket

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shoal_worker.settings import gloo_interface
from shoal_worker.store.redis_store import RedisStore


def address_towards(host: str, port: int) -> str | None:
    """The address of the interface that leads to `host`; None when there is no route. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            found: str = probe.getsockname()[0]
            return found
    except OSError:
        return None


def address_for(store: Store) -> str | None:
    """The address of the interface that leads to the store's server; None: let Gloo choose, by GLOO_SOCKET_IFNAME or the hostname."""
    if gloo_interface():
        return None
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    server: tuple[str, int] | None = None
    if isinstance(store, RedisStore):
        server = store.server
    elif isinstance(store, TCPStore):
        server = (store.host, store.port)
    return address_towards(*server) if server is not None else None
