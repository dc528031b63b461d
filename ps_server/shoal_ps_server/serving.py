"""Runs one server process from its start to its end, through all runs of its job and in both roles:
primary (`server.py`) and backup (`replication/standby.py`)."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack

from shoal_common.errors import CorruptDataError, InvalidRequestError

from shoal_ps_server.replication.standby import Standby
from shoal_ps_server.server import ParameterServer
from shoal_ps_server.session import AnotherRunError
from shoal_ps_server.settings import PsServerSettings
from shoal_ps_server.shard.shard import Shard
from shoal_ps_server.storage.directory import DataDirectory
from shoal_ps_server.storage.moves import Moves
from shoal_ps_server.storage.recovery import Recovered

logger = logging.getLogger(__name__)


async def serve(settings: PsServerSettings, stop: asyncio.Event) -> None:
    """Runs one server until `stop` is set or the job has ended, in the role that the coordinator
    assigns.

    Raises the errors of `ParameterServer.run` and `Standby.run`; CorruptDataError and
    ConfigurationError for an unusable data directory.
    """
    with ExitStack() as stack:
        directory = (
            None
            if settings.data_dir is None
            else stack.enter_context(DataDirectory(settings.data_dir))
        )
        while True:
            try:
                return await _serve_run(settings, directory, stop)
            except AnotherRunError as error:
                logger.warning(
                    "set this server's state aside and started over",
                    extra={"why": error, "where": _set_aside(directory)},
                )


def _set_aside(directory: DataDirectory | None) -> str:
    """Moves the server's state to a separate folder, because the state belongs to a different run.
    Returns a human-readable description of its new location."""
    if directory is None:
        return "nowhere, since it has no data directory"
    folder = directory.set_aside()
    return "nowhere, since it had no state" if folder is None else str(folder)


async def _serve_run(
    settings: PsServerSettings, directory: DataDirectory | None, stop: asyncio.Event
) -> None:
    """Serves with the state of one run of the job. Raises AnotherRunError when that run has ended,
    and the errors of `serve`."""
    recovered = _with_nothing() if directory is None else await _recover(settings, directory, stop)
    while recovered is not None and await ParameterServer(settings, directory, recovered).run(stop):
        assert directory is not None, "a server without one refuses to be in a job with backups"
        recovered = await Standby(settings, directory).run(stop)


async def _recover(
    settings: PsServerSettings, directory: DataDirectory, stop: asyncio.Event
) -> Recovered | None:
    """Returns the state recovered from the data directory; None if `stop` was set or the job has
    ended.

    If the state is unreadable, asks the coordinator whether this server is a backup. A backup does
    not need its old state, because its primary sends everything again. Raises the errors of
    `serve`.
    """
    try:
        return directory.recover(job_id=settings.job, server_id=settings.server_id)
    except CorruptDataError as unreadable:
        logger.error(
            "could not read the data directory; asking the coordinator whether this server is a "
            "backup",
            extra={"error": unreadable},
        )
        try:
            return await Standby(settings, directory).run(stop)
        except InvalidRequestError as error:
            # in a job without backups, a server that cannot serve has no purpose
            raise unreadable from error


def _with_nothing() -> Recovered:
    shard = Shard()
    return Recovered(shard=shard, moves=Moves(shard))
