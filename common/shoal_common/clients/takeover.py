"""Detects that a backup has replaced an unresponsive parameter server, and aborts the calls that
are waiting for the old server.

A process that is stopped (SIGSTOP, a frozen virtual machine) keeps its connections open, so a call
to it would last until its deadline of a minute or more. The coordinator is faster: it promotes the
backup as soon as the server's lease has expired. A thread of this module monitors calls that take
long. It sends requests to the coordinator only while a server does not respond to a health check.
Once the shard map has a different address for the server, it closes the client of the old one. The
calls then fail and are retried with the same sequence numbers at the new address.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_common.clients.parameter_server import ParameterServerClient
from shoal_common.errors import ShoalError

_log = logging.getLogger(__name__)

_TICK_S: Final = 0.25
_LONG_S: Final = 1.0
"""Duration of a call, in seconds, after which its server is checked."""
_CHECK_EVERY_TICKS: Final = 4
_CHECK_DEADLINE: Final = timedelta(seconds=0.5)


class TakeoverWatch:
    """Watches a process's clients of the job's parameter servers. Thread-safe."""

    def __init__(self, shard_map: Callable[[], pb.ShardMap | None]) -> None:
        """`shard_map`: requests the servers' addresses from the coordinator; returns None if they
        are unknown. Called on the watch's thread."""
        self._shard_map = shard_map
        self._lock = threading.Lock()
        self._clients: weakref.WeakSet[ParameterServerClient] = weakref.WeakSet()
        self._silent: weakref.WeakSet[ParameterServerClient] = weakref.WeakSet()
        """Clients with a long call whose server failed the last health check."""
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()

    def add(self, client: ParameterServerClient) -> None:
        """Watches `client` until it is closed."""
        with self._lock:
            self._clients.add(client)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="shoal-takeover", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        ticks = 0
        while clients := self._open_clients():
            slow = [client for client in clients if client.oldest_call_s > _LONG_S]
            if ticks % _CHECK_EVERY_TICKS == 0:
                self._silent = weakref.WeakSet(
                    client for client in slow if not client.answers(_CHECK_DEADLINE)
                )
            if silent := [client for client in slow if client in self._silent]:
                self._end_replaced(silent)
            del clients, slow, silent
            ticks += 1
            self._wake.wait(_TICK_S)

    def _open_clients(self) -> list[ParameterServerClient]:
        """Returns the clients that are still open. If there are none, the watch's thread must exit;
        `add` then starts a new thread."""
        with self._lock:
            clients = [client for client in self._clients if not client.is_closed]
            self._clients = weakref.WeakSet(clients)
            if not clients:
                self._thread = None
            return clients

    def _end_replaced(self, silent: list[ParameterServerClient]) -> None:
        try:
            shard_map = self._shard_map()
        except ShoalError as error:  # the caller learns of the error when its call ends
            _log.debug(
                "could not get the parameter servers' addresses from the coordinator: %s", error
            )
            return
        if shard_map is None:
            return
        addresses = {server.address for server in shard_map.servers}
        if "" in addresses:  # a new primary has not reported its address yet
            return
        for client in silent:
            if client.address not in addresses:
                _log.warning(
                    "the parameter server at %s stopped responding and was replaced; redirected "
                    "its calls to the new server",
                    client.address,
                )
                client.close()
