"""Cluster on this machine: a coordinator with an embedded Valkey server, and parameter servers,
each a process. Workers are not part of the cluster.

`LocalCluster` is a context manager. A caller with an event loop (`cluster_keeper`) instead performs
the steps of `open` one by one, and waits between them without blocking. Closing a cluster verifies
that all its processes have exited.

A cluster belongs to the thread that opens it; its processes are killed when that thread ends.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final, Self
from urllib.parse import quote

from shoal_common.errors import ConfigurationError, DeadlineError, UnavailableError
from shoal_common.system.scratch import ScratchDirectory

from shoal.launcher.clusters.jobs import JobSettings
from shoal.launcher.clusters.registry import Registration
from shoal.launcher.processes.ports import ReservedPort, ServiceAddresses, read_port_file
from shoal.launcher.processes.process import Child, stop_all

if TYPE_CHECKING:
    from shoal_common.clients.coordinator import CoordinatorClient

START_TIMEOUT: Final = timedelta(seconds=60)
POLL_INTERVAL: Final = timedelta(milliseconds=5)
_STOP_GRACE: Final = timedelta(seconds=10)
_PAGE_TIMEOUT_S: Final = 2.0
_FEW_LOSSES: Final = 3


StartService = Callable[[Sequence[str], Mapping[str, str], IO[bytes]], Child]
"""Function that starts a process from its command line, its environment and the file for its
output."""


def _start_fresh(command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> Child:
    return Child(command, environment=environment, stdout=log, stderr=log)


class Service:
    """Process of one of the cluster's services. Its program writes a port file once it serves
    requests, and its output goes to a log file."""

    def __init__(
        self,
        name: str,
        program: str,
        arguments: Sequence[str],
        *,
        directory: Path,
        environment: Mapping[str, str],
        host: str = "127.0.0.1",
        start: StartService | None = None,
    ) -> None:
        """Prepares the service; `start` starts its process.

        Args:
            name: service name, used in logs.
            program: module with the service's main program.
            arguments: arguments of the program, in addition to its addresses.
            directory: directory for the port file and the log, `<name>.log`.
            environment: environment variables of the process.
            host: address of this machine to listen on.
            start: function that starts the process; None: start it in a fresh interpreter.

        Raises:
            OSError: `host` is not an address of this machine.
        """
        self.name = name
        self._port = ReservedPort(host)
        self.address = f"[{host}]:{self._port.port}" if ":" in host else f"{host}:{self._port.port}"
        """Address of the gRPC service (host:port). It is known before the service starts and does
        not change when the service restarts."""
        self.log = directory / f"{name}.log"
        self._port_file = directory / f"{name}.json"
        # -P: user files in the caller's working directory must not shadow a service's modules.
        self._command = [
            sys.executable,
            "-P",
            "-m",
            program,
            "--listen",
            self.address,
            "--http",
            "127.0.0.1:0",
        ]
        self._command += [*arguments, "--port-file", str(self._port_file)]
        self._environment = environment
        self._start = start or _start_fresh
        self._child: Child | None = None
        self._addresses: ServiceAddresses | None = None

    @property
    def started(self) -> bool:
        return self._child is not None

    @property
    def child(self) -> Child:
        assert self._child is not None, f"{self.name} was not started"
        return self._child

    @property
    def addresses(self) -> ServiceAddresses:
        assert self._addresses is not None, f"{self.name} does not serve requests yet"
        return self._addresses

    def start(self) -> None:
        """Starts or restarts the service's process."""
        self._addresses = None
        self._port_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self._child = self._start(self._command, self._environment, log)

    def ready(self) -> bool:
        """Returns whether the service is serving requests. If its process has exited, raises an
        UnavailableError with the end of the service's log."""
        if self._addresses is None:
            ended = self.child.poll()
            self._addresses = read_port_file(self._port_file)
            if ended is not None and self._addresses is None:
                raise UnavailableError(
                    f"{self.name} did not start ({ended}); its last log lines: {self.last_words()}",
                    reason="SERVICE_FAILED",
                )
        return self._addresses is not None

    def wait_ready(self, timeout: timedelta) -> None:
        """Blocks until the service is serving requests. Raises DeadlineError, UnavailableError."""
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.ready():
            if time.monotonic() > deadline:
                raise self.late(timeout)
            time.sleep(POLL_INTERVAL.total_seconds())

    def late(self, timeout: timedelta) -> DeadlineError:
        return DeadlineError(
            f"{self.name} was not ready within {timeout.total_seconds():g} s of its start; "
            f"its last log lines: {self.last_words()}"
        )

    def release(self) -> None:
        """Releases the port. Must not be called before the process has been stopped."""
        self._port.close()

    def last_words(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except FileNotFoundError:
            lines = []
        return " | ".join(lines[-4:]) or "nothing"


class LocalCluster:
    """Coordinator, Valkey server and parameter servers of one job, on loopback addresses and
    without tokens."""

    def __init__(
        self, job: JobSettings, *, command: str = "", log_directory: Path | None = None
    ) -> None:
        """Prepares the cluster; `open` starts its processes.

        Args:
            job: job to create at the coordinator. Its parameter servers and their backups are
                started too.
            command: command that the cluster runs, shown by `shoal status`.
            log_directory: directory for the services' logs; None: the logs are deleted with the
                cluster's other files.
        """
        self.job = job
        self._scratch = ScratchDirectory("cluster")
        self.directory = self._scratch.path
        self._command = command
        self._log_directory = log_directory
        self._environment = _service_environment()
        self.coordinator = self._service(
            "coordinator",
            "shoal_coordinator",
            "--redis",
            f"embedded://{quote(str(self.directory / 'redis'))}",
        )
        self.servers: list[Service] = []
        self.start_server_process: StartService | None = None
        """Function that starts processes of parameter servers; None: each starts in a fresh
        interpreter."""
        self._client: CoordinatorClient | None = None
        self._registration: Registration | None = None

    # -------------------------------------------------------------------------------------- opening

    def open(self) -> None:
        """Starts the cluster and blocks until all services are serving. Raises UnavailableError or
        DeadlineError after stopping everything again."""
        try:
            self.start_coordinator()
            self.coordinator.wait_ready(START_TIMEOUT)
            self.create_job()
            self.register()
            self.start_servers()
            for server in self.servers:
                server.wait_ready(START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def start_coordinator(self) -> None:
        """Starts the coordinator. This is the first step of opening the cluster. The coordinator's
        address is already known before this call."""
        self.coordinator.start()

    def create_job(self) -> None:
        """Creates the job. This is the second step of opening the cluster, to be performed once the
        coordinator is ready. Blocks for the duration of an RPC. Unlike the other steps, it may be
        called from any thread."""
        self.client.create_job(self.job.message())

    def register(self) -> str | None:
        """Registers the cluster so that `shoal status` and similar commands find it. This is the
        third step of opening the cluster.

        Returns None if this succeeds, otherwise the reason why these commands need --coordinator.
        The run itself does not depend on the registration.
        """
        try:
            self._registration = Registration(
                job_id=self.job.job_id,
                coordinator=self.coordinator.address,
                http=self.coordinator.addresses.http,
                redis=self.coordinator.addresses.redis,
                command=self._command,
            )
        except (OSError, ConfigurationError) as error:
            return (
                f"could not register this run ({error}); pass --coordinator "
                f"{self.coordinator.address} to shoal status and shoal top"
            )
        return None

    def start_servers(self) -> None:
        """Starts the parameter servers, which then register with the job. This is the last step of
        opening the cluster."""
        for _ in range(self.job.parameter_servers * (1 + self.job.parameter_server_backups)):
            self.start_server()

    def start_server(self) -> Service:
        """Starts one more parameter server."""
        self.servers.append(self._server(len(self.servers)))
        self.servers[-1].start()
        return self.servers[-1]

    @property
    def serves_when_asked(self) -> bool:
        """True if the job starts without parameter servers but may get one when a script needs
        it."""
        return not self.job.parameter_servers and bool(self.job.max_parameter_servers)

    @property
    def client(self) -> CoordinatorClient:
        """Client of the coordinator, created on first use and closed with the cluster."""
        if self._client is None:
            from shoal_common.clients.coordinator import CoordinatorClient
            from shoal_common.rpc.channel import ChannelSettings

            self._client = CoordinatorClient(ChannelSettings(address=self.coordinator.address))
        return self._client

    @property
    def services(self) -> list[Service]:
        """Services that have been started, the coordinator first."""
        return [service for service in (self.coordinator, *self.servers) if service.started]

    def saved_page(self, known: Mapping[str, Any]) -> str | None:
        """Returns the job's status page with its data included, so that a browser can open it from
        a file. Returns None if the coordinator does not respond. Blocks for a few seconds at most.

        `known`: values to show in place of those that the coordinator reports. The entry "history"
        is used only if the coordinator's history has fewer than `_FEW_LOSSES` losses.
        """
        from http.client import HTTPException

        try:
            return self._saved_page(known)
        except (OSError, HTTPException, ValueError, KeyError):
            return None

    def _saved_page(self, known: Mapping[str, Any]) -> str:
        from http.client import HTTPConnection

        host, _, port = self.coordinator.addresses.http.rpartition(":")
        name = quote(self.job.job_id)
        paths = ("/", "/api/jobs", f"/api/job?job={name}", f"/api/events?job={name}")
        answers = []
        for path in paths:
            connection = HTTPConnection(host, int(port), timeout=_PAGE_TIMEOUT_S)
            try:
                connection.request("GET", path)
                answers.append(connection.getresponse().read().decode())
            finally:
                connection.close()
        page, *data = answers
        saved = {
            path.partition("?")[0]: json.loads(text)
            for path, text in zip(paths[1:], data, strict=True)
        }
        shown = saved["/api/job"]
        kept, known = shown["history"], dict(known)
        history = known.pop("history", [])
        for job in (shown, *saved["/api/jobs"]["jobs"]):
            job |= known
        # the coordinator records a point per second, and a short run may end before the first
        losses = sum(point[2] is not None for point in kept)
        shown["history"] = history if history and losses < _FEW_LOSSES else kept
        # within a script element, only "<" could close it
        text = json.dumps(saved).replace("<", "\\u003c")
        return page.replace(
            "<script>", f'<script type="application/json" id="saved">{text}</script>\n<script>', 1
        )

    def worker_environment(self, member_id: str, *, index: int) -> dict[str, str]:
        """Returns the SHOAL_... variables that a worker process started by hand needs to join the
        cluster's job."""
        return {
            "SHOAL_COORDINATOR": self.coordinator.address,
            "SHOAL_JOB_ID": self.job.job_id,
            "SHOAL_MEMBER_ID": member_id,
            "SHOAL_LAUNCHER_ID": f"cluster-{os.getpid()}",
            "SHOAL_LOCAL_INDEX": str(index),
        }

    def _service(self, name: str, program: str, *arguments: str) -> Service:
        return Service(
            name, program, arguments, directory=self.directory, environment=self._environment
        )

    def _server(self, index: int) -> Service:
        name = f"server-{index}"
        data = self.directory / name
        data.mkdir()
        identity = (
            "--coordinator",
            self.coordinator.address,
            "--job",
            self.job.job_id,
            "--server-id",
            name,
        )
        arguments = (*identity, "--data-dir", str(data))
        return Service(
            name,
            "shoal_ps_server",
            arguments,
            directory=self.directory,
            environment=self._environment,
            start=self.start_server_process,
        )

    # -------------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Stops all services: parameter servers first, so that they can unregister from the
        coordinator. Idempotent.

        Raises DeadlineError if a process of the cluster still exists afterwards.
        """
        if self._registration is not None:
            self._registration.close()
        if self._client is not None:
            self._client.close()
        try:
            stop_all([server.child for server in self.servers if server.started], grace=_STOP_GRACE)
        finally:
            try:
                stop_all(
                    [self.coordinator.child] if self.coordinator.started else [], grace=_STOP_GRACE
                )
            finally:
                self._clean_up()

    def _clean_up(self) -> None:
        for service in (self.coordinator, *self.servers):
            service.release()
        self._keep_logs()
        self._scratch.close()

    def _keep_logs(self) -> None:
        if self._log_directory is not None and self.directory.exists():
            self._log_directory.mkdir(parents=True, exist_ok=True)
            for log in self.directory.glob("*.log"):
                shutil.copy(log, self._log_directory / log.name)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _service_environment() -> dict[str, str]:
    """Returns the environment for the cluster's services: the caller's, without SHOAL_COORDINATOR_*
    and SHOAL_PS_SERVER_* variables (which configure services outside the cluster), and with
    OMP_NUM_THREADS=1 unless it is set."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SHOAL_COORDINATOR_", "SHOAL_PS_SERVER_"))
    }
    # Each service uses at most one core; more threads would only compete with the workers.
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment
