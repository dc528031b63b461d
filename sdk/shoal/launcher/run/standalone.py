"""A run on one machine with its own cluster: `shoal run --standalone`.

Workers and cluster start at the same time. Workers need the coordinator only after they have
imported torch, which takes longer than starting the cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal_common.formats.runs import Run

from shoal.launcher.clusters.cluster import LocalCluster, StartService
from shoal.launcher.clusters.cluster_keeper import ClusterKeeper
from shoal.launcher.clusters.jobs import JobSettings
from shoal.launcher.processes.ports import ReservedPort
from shoal.launcher.run.site import Ending
from shoal.launcher.workers.environment import NodePlacement
from shoal.launcher.workers.settings import RunSettings

if TYPE_CHECKING:
    from shoal.launcher.run.reporter import ExitReporter


class StandaloneSite:
    """Environment of a run with its own cluster. Implements `site.Site`. Belongs to the event
    loop's thread."""

    def __init__(
        self,
        settings: RunSettings,
        *,
        note: Callable[[str], None],
        log_directory: Path | None = None,
    ) -> None:
        self._settings = settings
        self._cluster = LocalCluster(
            job_of(settings), command=settings.program, log_directory=log_directory
        )
        self._keeper = ClusterKeeper(self._cluster, note=note)
        self._master_port: ReservedPort | None = None
        self.coordinator = self._cluster.coordinator.address
        self.run: Run | None = None

    def begin(self, start_service: StartService) -> None:
        self._cluster.start_server_process = start_service
        self._cluster.start_coordinator()

    async def open(self, launcher_id: str) -> ExitReporter:
        await self._keeper.open()
        from shoal.launcher.run.reporter import ExitReporter

        return ExitReporter(
            self._cluster.client, job_id=self._settings.job_id, launcher_id=launcher_id
        )

    async def keep(self) -> None:
        await self._keeper.keep()

    async def place(self, *, again: bool) -> NodePlacement:
        """Returns a placement without waiting. Unless a flag sets the master port, each call
        returns a new port, since the previous one may still be in use."""
        self._release_port()
        port = self._settings.master_port
        if port is None:
            self._master_port = ReservedPort()
            port = self._master_port.port
        return NodePlacement(
            node_rank=0,
            node_count=1,
            master_address=self._settings.master_address or "127.0.0.1",
            master_port=port,
        )

    async def moved(self) -> None:
        """Never returns, since there are no other launchers."""
        await asyncio.Event().wait()

    def fail(self, reason: str) -> None:
        """Does nothing, since there are no other launchers."""

    def saved_page(self, known: Mapping[str, Any]) -> str | None:
        return self._cluster.saved_page(known)

    def close(self, ending: Ending) -> None:
        self._release_port()
        self._cluster.close()

    def _release_port(self) -> None:
        if self._master_port is not None:
            self._master_port.close()


def job_of(settings: RunSettings) -> JobSettings:
    """Returns the settings of the job for a run on one machine.

    At the start, the grace period lets all workers join. Later, training continues even with a
    single worker, unless --min-workers requires more. A script may get a parameter server even if
    the command line does not request any.
    """
    return JobSettings(
        job_id=settings.job_id,
        min_workers=settings.min_survivors,
        max_workers=settings.workers,
        parameter_servers=settings.servers,
        parameter_server_backups=settings.server_backups,
        max_parameter_servers=settings.max_servers or (0 if settings.servers else 1),
        join_grace=settings.effective_join_grace,
    )
