"""Opens a local cluster without blocking an event loop, and keeps its services running: a service
that dies is restarted at its address.

The coordinator's state is in Redis and the members reconnect, so training continues. A parameter
server returns with all changes that it had acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from shoal_common.errors import DeadlineError, ShoalError, UnavailableError

from shoal.launcher.clusters.cluster import POLL_INTERVAL, START_TIMEOUT, LocalCluster, Service

_SHORT_LIFE_S: Final = 5.0
"""Time after which a service counts as well started. A later end has another cause and is not
counted."""
_MOST_SHORT_LIVES: Final = 4
"""Maximum number of consecutive short lives of a service. A further restart would fail in the same
way."""
_ASK_EVERY_S: Final = 0.5
"""Interval between requests to the coordinator: whether a script waits for parameter servers, if
none was started with the job; and about the job, if the coordinator was restarted."""
NOBODY: Final = "nobody"
"""Id that no member has. If asked about it, the coordinator omits all members from its answer."""


class ClusterKeeper:
    """Opens and keeps the services of a local cluster. Belongs to the event loop's thread, which
    must live as long as the cluster."""

    def __init__(self, cluster: LocalCluster, *, note: Callable[[str], None]) -> None:
        """`note`: function that informs people of events."""
        self._cluster = cluster
        self._note = note

    async def open(self) -> None:
        """Completes the opening of the cluster after `start_coordinator`. Raises UnavailableError,
        DeadlineError; the caller must then close the cluster."""
        cluster = self._cluster
        await _until_ready(cluster.coordinator)
        # In a thread, because it imports gRPC, which takes longer than the call itself.
        await asyncio.to_thread(cluster.create_job)
        if (unregistered := cluster.register()) is not None:
            self._note(unregistered)
        cluster.start_servers()
        for server in cluster.servers:
            await _until_ready(server)

    async def keep(self) -> None:
        """Restarts services that die, until cancelled. Must be cancelled before the cluster is
        closed."""
        kept = [self._keep(service) for service in self._cluster.services]
        await asyncio.gather(
            *kept, *([self._serve_when_asked()] if self._cluster.serves_when_asked else [])
        )

    async def _serve_when_asked(self) -> None:
        """Starts a parameter server once a worker waits for one, and then keeps it running."""
        cluster = self._cluster
        while not await asyncio.to_thread(self._servers_awaited):
            await asyncio.sleep(_ASK_EVERY_S)
        server = cluster.start_server()
        self._note(
            f"the script uses parameter servers, so {server.name} was started; use --servers N to "
            "start more from the beginning"
        )
        await self._keep(server)

    def _servers_awaited(self) -> bool:
        try:
            return (
                self._cluster.client.get_job(
                    self._cluster.job.job_id, member_id=NOBODY
                ).servers_awaited
                > 0
            )
        except ShoalError:
            return False  # the coordinator is being started again

    async def _keep(self, service: Service) -> None:
        loop = asyncio.get_running_loop()
        served_since: float | None = loop.time()
        short_lives = 0
        while True:
            pid, status = service.child.pid, await service.child.wait()
            if status.ok:
                return  # the service ended on request: the job is over, or the server was drained
            served_long = served_since is not None and loop.time() - served_since >= _SHORT_LIFE_S
            short_lives = 0 if served_long else short_lives + 1
            if short_lives >= _MOST_SHORT_LIVES:
                self._note(
                    f"{service.name} (pid {pid}) ended ({status}) within {_SHORT_LIFE_S:g} s of "
                    f"serving, {_MOST_SHORT_LIVES} times in a row, and is not restarted; its last "
                    f"log lines: {service.last_words()}"
                )
                return
            service.start()
            served_since = None
            try:
                await _until_ready(service)
                served_since = loop.time()
                if service is self._cluster.coordinator:
                    await self._create_job_again(service)
            except ShoalError as error:
                if service.child.poll() is None:  # otherwise the loop's next pass reports its end
                    self._note(str(error))
            else:
                self._note(
                    f"{service.name} (pid {pid}) ended ({status}) and was restarted as pid "
                    f"{service.child.pid}"
                )

    async def _create_job_again(self, coordinator: Service) -> None:
        """Creates the job again in case the coordinator's data was lost; otherwise changes nothing.
        Retries until the coordinator answers, since for a while after failures gRPC itself reports
        it as unreachable. Raises ShoalError if the coordinator has ended or does not answer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_TIMEOUT.total_seconds()
        while True:
            try:
                await asyncio.to_thread(self._cluster.create_job)
            except (UnavailableError, DeadlineError):
                if coordinator.child.poll() is not None or loop.time() > deadline:
                    raise
                await asyncio.sleep(_ASK_EVERY_S)
            else:
                return


async def _until_ready(service: Service) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_TIMEOUT.total_seconds()
    while not service.ready():
        if loop.time() > deadline:
            raise service.late(START_TIMEOUT)
        await asyncio.sleep(POLL_INTERVAL.total_seconds())
