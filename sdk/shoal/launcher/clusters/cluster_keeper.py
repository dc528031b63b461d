"""Starts a local cluster without blocking an event loop, and restarts dead services at their old
addresses.

Training continues during a restart, since the coordinator's state is in Redis and members
reconnect. A restarted parameter server has all changes that it had acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from shoal_common.errors import DeadlineError, ShoalError, UnavailableError

from shoal.launcher.clusters.cluster import POLL_INTERVAL, START_TIMEOUT, LocalCluster, Service

_SHORT_LIFE_S: Final = 5.0
"""Time in seconds after which a service counts as started successfully. If it exits later, the
count of short lives starts again at zero."""
_MOST_SHORT_LIVES: Final = 4
"""Number of consecutive short lives after which a service is no longer restarted, since it would
fail in the same way again."""
_ASK_EVERY_S: Final = 0.5
"""Interval in seconds between requests to the coordinator. They determine whether a restarted
coordinator still has the job and, if no parameter servers were started with the job, whether a
script is waiting for some."""
NOBODY: Final = "nobody"
"""Id that no member has. A response filtered by this id omits all members."""


class ClusterKeeper:
    """Starts the services of a local cluster and keeps them running. Belongs to the event loop's
    thread, which must not end before the cluster is closed."""

    def __init__(self, cluster: LocalCluster, *, note: Callable[[str], None]) -> None:
        """`note`: callback that shows a message to the user."""
        self._cluster = cluster
        self._note = note

    async def open(self) -> None:
        """Starts the rest of the cluster after `start_coordinator`. Raises UnavailableError or
        DeadlineError; the caller must then close the cluster."""
        cluster = self._cluster
        await _until_ready(cluster.coordinator)
        # Runs on a thread, because it imports gRPC, which takes longer than the call itself.
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
        """Starts a parameter server once a worker is waiting for one, and then keeps it running."""
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
            return False  # the coordinator is being restarted

    async def _keep(self, service: Service) -> None:
        loop = asyncio.get_running_loop()
        served_since: float | None = loop.time()
        short_lives = 0
        while True:
            pid, status = service.child.pid, await service.child.wait()
            if status.ok:
                return  # exited on request: the job has ended, or the server was drained
            served_long = served_since is not None and loop.time() - served_since >= _SHORT_LIFE_S
            short_lives = 0 if served_long else short_lives + 1
            if short_lives >= _MOST_SHORT_LIVES:
                self._note(
                    f"{service.name} (pid {pid}) ended ({status}) within {_SHORT_LIFE_S:g} s "
                    f"of its start, {_MOST_SHORT_LIVES} times in a row, and is not restarted; "
                    f"its last log lines: {service.last_words()}"
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
                if (
                    service.child.poll() is None
                ):  # if it has exited, the next iteration of the loop reports that
                    self._note(str(error))
            else:
                self._note(
                    f"{service.name} (pid {pid}) ended ({status}) and was restarted as pid "
                    f"{service.child.pid}"
                )

    async def _create_job_again(self, coordinator: Service) -> None:
        """Creates the job again if the coordinator has lost it.

        Retries until the coordinator responds, because gRPC reports it as unreachable for a while
        after failures. Raises ShoalError if the coordinator has exited or does not respond.
        """
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
