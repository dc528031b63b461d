"""A coordinator that other machines reach, with a Redis of its own, beside what it coordinates (a
command, or a run on Ray).

It outlives what it coordinates: batch systems send SIGTERM to all processes of a job at once, while
workers need it to leave together. So the signal is blocked in it (and in its Redis). When it dies
it is started again at its address, with what it knew.

All belongs to one thread: the coordinator is killed when that ends.
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

from shoal.launcher.cluster import START_TIMEOUT, Service
from shoal.launcher.process import stop_all, wait_all

_STOP_GRACE: Final = timedelta(seconds=10)
_SHORT_LIFE_S: Final = 5.0


class HostedCoordinator:
    """One coordinator; `start` it, look after it with `keep_up`, and `close` it."""

    def __init__(
        self,
        directory: Path,
        *,
        host: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        note: Callable[[str], None],
    ) -> None:
        """Does not start it.

        Args:
            directory: gets its data, port file and log.
            host: how other machines name this one.
            arguments: further ones of the coordinator's.
            environment: of its process; where SHOAL_COORDINATOR_REDIS is set, it brings no Redis of
                its own.
            note: tells a person what happens.

        Raises:
            ConfigurationError: `host` is not this machine.
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
                f"--host {host!r} is not this machine: {error}; name it as the other machines do"
            ) from error

    @property
    def address(self) -> str:
        """host:port, which it keeps."""
        return self._service.address

    @property
    def is_running(self) -> bool:
        """Whether the coordinator's process runs, as far as was noticed: `pidfd` becomes readable
        when it ends."""
        return self._service.child.status is None

    @property
    def pidfd(self) -> int:
        return self._service.child.pidfd

    def start(self) -> None:
        """Blocks until it serves. Raises UnavailableError, DeadlineError."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a child inherits it
        try:
            self._service.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._service.wait_ready(START_TIMEOUT)
        self._served_since = time.monotonic()

    def keep_up(self) -> None:
        """Starts it again if it has died since it was looked at last; one that died as soon as it
        served is given up."""
        if not self.is_running or self._service.child.poll() is None:
            return
        lost = (
            f"the coordinator (pid {self._service.child.pid}) ended "
            f"({self._service.child.status}; its last words: "
        )
        lost += f"{self._service.last_words()})"
        if time.monotonic() - self._served_since < _SHORT_LIFE_S:
            self._note(
                f"{lost} as soon as it served, and is given up: workers go on, but none can join "
                "or be replaced"
            )
            return
        try:
            self.start()
        except ShoalError as error:
            self._note(
                f"{lost} and does not come back: {error}; workers go on, but none can join or be "
                "replaced"
            )
        else:
            self._note(f"{lost} and serves again as pid {self._service.child.pid}")

    def close(self) -> None:
        """Ends it, if it was started."""
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
