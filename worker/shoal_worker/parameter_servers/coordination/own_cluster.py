"""A coordinator and a parameter server owned by this process, for `python train.py` without a
cluster.

The package shoal-worker does not depend on the services, so this module runs their programs, if
they are installed, as child processes that listen on loopback. They never outlive this process: it
stops them when it exits normally, and the kernel kills them otherwise. Their output goes to a file.
If they fail to start, the error quotes the end of that file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import ConfigurationError, DeadlineError, UnavailableError
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.system.processes import tied_to_parent
from shoal_common.system.scratch import ScratchDirectory
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_worker.elastic.contract.generation import MemberIdentity
from shoal_worker.elastic.coordinator.link import CoordinatorLink
from shoal_worker.elastic.coordinator.member import LeaveReason
from shoal_worker.elastic.coordinator.membership import Membership
from shoal_worker.elastic.session.session import Session
from shoal_worker.parameter_servers.coordination.job import Job
from shoal_worker.settings import environment_without_settings

_COORDINATOR: Final = "shoal_coordinator"
_PS_SERVER: Final = "shoal_ps_server"
_DISTRIBUTIONS: Final = {_COORDINATOR: "shoal-coordinator", _PS_SERVER: "shoal-ps-server"}
_JOB: Final = "alone"
_START_TIMEOUT: Final = timedelta(seconds=60)
_STOP_TIMEOUT: Final = timedelta(seconds=10)
_POLL_S: Final = 0.01
_LAST_WORDS: Final = 5

JobT = TypeVar("JobT", bound=Job)


def open_job(session: Session, kind: type[JobT]) -> tuple[JobT, OwnCluster | None]:
    """Returns the session's job for use with parameter servers. If this process does not belong to
    a cluster, also starts a cluster and returns it; the caller must close it. Otherwise, returns
    None in its place.

    Raises:
        ConfigurationError: the ranks belong to a launch without servers, or `OwnCluster` cannot
            start the services.
    """
    membership, settings, own = session.membership, session.settings, None
    if membership is None:
        own = OwnCluster()
        link, channel = own.link, own.channel
    elif isinstance(membership, Membership):
        assert settings.coordinator is not None
        link, channel = membership.link, settings.channel(settings.coordinator)
    else:
        raise ConfigurationError(
            "the model has sparse tables, whose rows are on parameter servers, but ranks of "
            "`shoal.launch` have no servers; start the script with `shoal run --servers 1 ...`"
        )
    job = kind(
        link,
        channel,
        patience=settings.rendezvous_timeout,
        straggler_patience=settings.collective_timeout,
        transport=settings.server_transport,
        fell_back=lambda transport: session.metrics.transports_lost.labels(transport).inc(),
        interceptors=[session.metrics.calls],
    )
    session.progress.server_waits = lambda: job.waits.now
    return job, own


class OwnCluster:
    """A coordinator and a parameter server. This process is the only member of their job."""

    def __init__(self) -> None:
        """Starts the services and returns once they are ready.

        Raises:
            ConfigurationError: the services are not installed.
            UnavailableError, DeadlineError: a service did not start.
        """
        missing = [
            distribution
            for module, distribution in _DISTRIBUTIONS.items()
            if importlib.util.find_spec(module) is None
        ]
        if missing:
            raise ConfigurationError(
                "training with parameter servers but without a cluster starts a local server, "
                f"but {' and '.join(missing)} cannot be found; run `pip install "
                f"{' '.join(missing)}`, or start the script with `shoal run --servers 1 ...`"
            )
        self._scratch = ScratchDirectory("alone")
        self._services: list[_Service] = []
        self._link: CoordinatorLink | None = None
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def link(self) -> CoordinatorLink:
        """This process's connection to the coordinator, as a member that has a rank."""
        assert self._link is not None
        return self._link

    @property
    def channel(self) -> ChannelSettings:
        """Settings for connecting to the services."""
        return self._channel

    def close(self) -> None:
        """Leaves the job and stops the services. Returns once they have exited. Idempotent."""
        if self._link is not None:
            self._link.leave(LeaveReason.FINISHED, timeout=timedelta(seconds=2))
        for service in reversed(self._services):
            service.stop()
        self._services.clear()
        self._scratch.close()

    def _open(self) -> None:
        coordinator = self._start(_COORDINATOR, "--redis", "embedded://")
        self._channel = ChannelSettings(address=coordinator)
        with CoordinatorClient(self._channel) as client:
            client.create_job(
                pb.JobSpec(job_id=_JOB, min_workers=1, max_workers=1, parameter_servers=1)
            )
        self._start(_PS_SERVER, "--coordinator", coordinator, "--job", _JOB, "--server-id", "own")
        identity = MemberIdentity(
            job_id=_JOB, member_id=uuid.uuid4().hex, host="localhost", pid=os.getpid()
        )
        self._link = CoordinatorLink(
            CoordinatorClient(self._channel), identity, on_generation=lambda generation: None
        )
        self._link.connect(_START_TIMEOUT)
        self._link.ready()
        self._link.wait_generation(after=0, timeout=_START_TIMEOUT)

    def _start(self, module: str, *arguments: str) -> str:
        """Starts a service and returns its address."""
        service = _Service(module, arguments, self._scratch.path)
        self._services.append(service)
        return service.wait_address()


class _Service:
    """Process of one service, from its start to its exit."""

    def __init__(self, module: str, arguments: Sequence[str], directory: Path) -> None:
        self._module = module
        self._port_file = directory / f"{module}.json"
        self._log = directory / f"{module}.log"
        command = [
            sys.executable,
            "-P",
            "-m",
            module,
            "--listen",
            "127.0.0.1:0",
            "--http",
            "127.0.0.1:0",
        ]
        self._command = [*command, "--port-file", str(self._port_file), *arguments]
        started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()
        # The kernel ties a child process to the thread that starts it. This thread lives as long as
        # the child.
        threading.Thread(
            target=self._keep, args=(started,), name=f"shoal-keep-{module}", daemon=True
        ).start()
        process = started.get()
        if isinstance(process, OSError):
            raise UnavailableError(
                f"{sys.executable} -m {module} could not be started: {process}",
                reason="SERVICE_FAILED",
            ) from process
        self._process = process

    def wait_address(self) -> str:
        """Waits until the service is serving and returns host:port of its gRPC endpoint."""
        deadline = time.monotonic() + _START_TIMEOUT.total_seconds()
        while True:
            with contextlib.suppress(FileNotFoundError):
                addresses: dict[str, Any] = json.loads(self._port_file.read_text())
                return str(addresses["grpc"])
            if self._process.poll() is not None:
                raise UnavailableError(
                    f"{self._module} did not start (status {self._process.returncode}); its last "
                    f"output: {self._last_words()}",
                    reason="SERVICE_FAILED",
                )
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{self._module} was not ready within {_START_TIMEOUT}; its last output: "
                    f"{self._last_words()}"
                )
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Sends SIGTERM, then SIGKILL if the process does not exit in time."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT.total_seconds())
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _keep(self, started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError]) -> None:
        # SIGTERM, so that the coordinator can clean up its own children and files.
        command = tied_to_parent(self._command, death_signal=signal.SIGTERM)
        try:
            with self._log.open("wb") as log:
                # A separate session: the terminal's Ctrl-C is meant for the script, which then
                # decides when to stop.
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment_without_settings(),
                    start_new_session=True,
                )
        except OSError as error:
            started.put(error)
            return
        started.put(process)
        process.wait()

    def _last_words(self) -> str:
        lines = (
            self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        )
        return " | ".join(lines[-_LAST_WORDS:]) or "nothing"
