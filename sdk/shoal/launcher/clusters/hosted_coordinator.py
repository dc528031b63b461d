"""Coordinator with its own Redis server that other machines can reach. It runs alongside the
command, or the run on Ray, that it coordinates.

The coordinator must outlive the command: batch systems send SIGTERM to all processes of a job at
the same time, but the workers need the coordinator in order to leave together. The coordinator and
its Redis server therefore block this signal. A coordinator that dies is restarted at the same
address with its data.

All objects belong to one thread; the coordinator is killed when that thread ends.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final
from urllib.parse import quote

from shoal_common.errors import ConfigurationError, ShoalError

from shoal.launcher.clusters.cluster import START_TIMEOUT, Service
from shoal.launcher.processes.process import stop_all, wait_all

_STOP_GRACE: Final = timedelta(seconds=10)
_SHORT_LIFE_S: Final = 5.0


class HostedCoordinator:
    """Coordinator with its own Redis server. The thread that creates it must call `start`, then
    `keep_up` at regular intervals, and finally `close`."""

    def __init__(
        self,
        directory: Path,
        *,
        host: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        note: Callable[[str], None],
    ) -> None:
        """Prepares the coordinator; `start` starts it.

        Args:
            directory: directory for the coordinator's data, port file and log.
            host: name under which other machines reach this machine.
            arguments: additional arguments of the coordinator.
            environment: environment of its process; if it sets SHOAL_COORDINATOR_REDIS, no Redis
                server is started.
            note: callback that shows a message to the user.

        Raises:
            ConfigurationError: `host` is not an address of this machine.
        """
        redis = (
            []
            if environment.get("SHOAL_COORDINATOR_REDIS")
            else ["--redis", _redis_url(host, directory)]
        )
        self._note = note
        self._served_since = 0.0
        try:
            self._service = Service(
                "coordinator",
                "shoal_coordinator",
                [*redis, *arguments],
                directory=directory,
                environment=environment,
                host=host,
            )
        except OSError as error:
            raise ConfigurationError(
                f"--host {host!r} is not an address of this machine: {error}; use the name by "
                "which other machines reach it"
            ) from error

    @property
    def address(self) -> str:
        """Address of the coordinator (host:port), which never changes."""
        return self._service.address

    @property
    def is_running(self) -> bool:
        """True if the coordinator's process was running at the last check. When the process exits,
        `pidfd` becomes readable."""
        return self._service.child.status is None

    @property
    def pidfd(self) -> int:
        return self._service.child.pidfd

    def start(self) -> None:
        """Starts the coordinator and blocks until it is serving. Raises UnavailableError,
        DeadlineError."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a child inherits it
        try:
            self._service.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._service.wait_ready(START_TIMEOUT)
        self._served_since = time.monotonic()

    def keep_up(self) -> None:
        """Restarts the coordinator if it has died since the last check. A coordinator that died
        right after its start is not restarted."""
        if not self.is_running or self._service.child.poll() is None:
            return
        lost = (
            f"the coordinator (pid {self._service.child.pid}) ended ({self._service.child.status}; "
            "its last log lines: "
        )
        lost += f"{self._service.last_words()})"
        if time.monotonic() - self._served_since < _SHORT_LIFE_S:
            self._note(
                f"{lost} right after it started, so it is not restarted; workers continue, but "
                "none can join or be replaced"
            )
            return
        try:
            self.start()
        except ShoalError as error:
            self._note(
                f"{lost} and could not be restarted: {error}; workers continue, but none can join "
                "or be replaced"
            )
        else:
            self._note(f"{lost} and was restarted as pid {self._service.child.pid}")

    def close(self) -> None:
        """Stops the coordinator if it was started."""
        try:
            if self._service.started:
                child = self._service.child
                child.send(signal.SIGINT)
                wait_all([child], _STOP_GRACE)
                stop_all([child], grace=timedelta(0))
        finally:
            self._service.release()


def _redis_url(host: str, directory: Path) -> str:
    return f"embedded://{f'[{host}]' if ':' in host else host}{quote(str(directory / 'redis'))}"
