"""Finds the coordinators of jobs, and keeps one connection per coordinator."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import UnavailableError
from shoal_common.rpc.channel import ChannelSettings

from shoal.launcher.clusters.registry import newest_cluster, running_clusters
from shoal.launcher.processes.credentials import channel_settings


class Connections:
    """Connections to one coordinator, or to the coordinators of all clusters on this machine.
    Thread-safe."""

    def __init__(self, coordinator: str | ChannelSettings | None, *, timeout: timedelta) -> None:
        """`timeout`: deadline of each call."""
        if isinstance(coordinator, str):
            coordinator = channel_settings(coordinator)
        self.shared = coordinator and replace(coordinator, deadline=timeout)
        """Settings for the shared coordinator. None: use the coordinators of the clusters on this
        machine."""
        self._timeout = timeout
        self._lock = threading.Lock()
        self._clients: dict[str, CoordinatorClient] = {}
        """Clients by the coordinator's address."""
        self._closed = False

    def settings(self, job_id: str) -> ChannelSettings:
        """Returns the settings for calling a job's coordinator. Raises UnknownResourceError if no
        cluster on this machine runs the job."""
        return self.shared or ChannelSettings(
            address=newest_cluster(job=job_id).coordinator, deadline=self._timeout
        )

    def of(self, job_id: str) -> CoordinatorClient:
        """Returns a client of a job's coordinator. Raises the errors of `settings`."""
        return self._client(self.settings(job_id))

    def all(self) -> list[CoordinatorClient]:
        """Returns one client for each coordinator."""
        if self.shared is not None:
            return [self._client(self.shared)]
        addresses = dict.fromkeys(record.coordinator for record in running_clusters())
        self._forget_others(set(addresses))
        return [
            self._client(ChannelSettings(address=address, deadline=self._timeout))
            for address in addresses
        ]

    def close(self) -> None:
        """Closes all connections; calls in progress fail with UnavailableError. Idempotent."""
        with self._lock:
            self._closed = True
            clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()

    def _client(self, settings: ChannelSettings) -> CoordinatorClient:
        with self._lock:
            if self._closed:
                raise UnavailableError(
                    "this client is closed; create a new one", reason="CLIENT_CLOSED"
                )
            if settings.address not in self._clients:
                self._clients[settings.address] = CoordinatorClient(settings)
            return self._clients[settings.address]

    def _forget_others(self, addresses: set[str]) -> None:
        """Closes the connections to clusters that have ended. `addresses`: coordinators of the
        clusters that are running."""
        with self._lock:
            gone = [self._clients.pop(address) for address in self._clients.keys() - addresses]
        for client in gone:
            client.close()
