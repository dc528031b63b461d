"""Coordinator, parameter servers and workers as processes, for tests of asynchronous training."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from shoal_common.clients import CoordinatorClient, ParameterServerClient
from shoal_common.errors import ShoalError
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2, parameter_server_pb2
from shoal_worker.elastic.contract.generation import MemberIdentity
from shoal_worker.elastic.coordinator.membership import Membership
from shoal_worker.elastic.session.session import Session
from shoal_worker.elastic.session.worker_process import set_session
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.settings import WorkerSettings

from tests.integration.coordinator.harness import Coordinator
from tests.zygote.children import PATIENCE_S, Child, Zygote, eventually


class Server:
    """One parameter server process, which can be restarted on the same data directory."""

    def __init__(
        self, cluster: AsyncCluster, index: int, *, keeps_data: bool, **environment: str
    ) -> None:
        self._cluster = cluster
        self.server_id = f"server-{index}"
        self._keeps_data = keeps_data
        self._directory = cluster.directory / self.server_id
        self.data = self._directory / "data"
        self._directory.mkdir()
        self.start(**environment)

    def start(self, *, coordinator: str = "", **environment: str) -> None:
        """Starts the process. `coordinator`: address to connect to; empty: the cluster's
        coordinator."""
        self._port_file = self._directory / f"{uuid.uuid4().hex}.json"
        arguments = [
            "--coordinator",
            coordinator or self._cluster.coordinator.address,
            "--job",
            self._cluster.job_id,
        ]
        arguments += [
            "--server-id",
            self.server_id,
            "--port-file",
            str(self._port_file),
            "--snapshot-interval",
            "0s",
        ]
        if self._keeps_data:
            arguments += ["--data-dir", str(self.data)]
        self.process = self._cluster.zygote.start(
            "server", arguments, output=self._directory / "log", **environment
        )

    @property
    def address(self) -> str:
        text = eventually(
            lambda: self._port_file.exists() and self._port_file.read_text(),
            f"{self.server_id}: {self.process.said()}",
        )
        return str(json.loads(text)["grpc"])

    def look(self) -> parameter_server_pb2.GetServerResponse:
        with ParameterServerClient(ChannelSettings(address=self.address)) as client:
            return client.get_server()

    def looks(self) -> parameter_server_pb2.GetServerResponse | None:
        """Returns the server's description, or None while it cannot be reached."""
        with suppress(ShoalError):
            return self.look()
        return None

    def snapshot(self) -> None:
        with ParameterServerClient(ChannelSettings(address=self.address)) as client:
            client.snapshot(self._cluster.job_id)

    def try_snapshot(self) -> None:
        """Requests a snapshot; ignores errors, because the server may die during the request."""
        with suppress(ShoalError):
            self.snapshot()


class Worker:
    """One worker process."""

    def __init__(self, process: Child, directory: Path) -> None:
        self.process = process
        self.directory = directory

    def reached(self, step: int) -> bool:
        """Returns whether the worker has received batch `step`, counted from 0."""
        return (self.directory / f"step-{step}").exists()

    def wait_step(self, step: int) -> None:
        """Waits until the worker has received batch `step`; fails if the worker has ended."""
        eventually(
            lambda: self.reached(step) or self.process.ended.is_set(),
            f"step {step}: {self.process.said()}",
        )
        assert not self.process.ended.is_set(), self.process.said()

    def go(self, step: int) -> None:
        """Releases a worker that is held at batch `step`."""
        (self.directory / f"go-{step}").touch()

    def result(self) -> dict[str, Any]:
        """Waits for the worker to end with status 0 and returns its result."""
        status = self.process.wait()
        assert status == 0, f"status {status}: {self.process.said()}"
        result: dict[str, Any] = json.loads((self.directory / "result.json").read_text())
        return result


class AsyncCluster:
    """One job with its parameter servers and workers."""

    def __init__(
        self,
        zygote: Zygote,
        coordinator: Coordinator,
        directory: Path,
        *,
        servers: int = 2,
        max_servers: int = 0,
        backups: int = 0,
        keeps_data: bool = True,
        together: int = 1,
        min_workers: int = 1,
        max_workers: int = 8,
        lease_ms: int = 10_000,
        stall_timeout_ms: int = 60_000,
    ) -> None:
        """Creates the job and starts its servers. `together`: number of workers that the first
        generation waits for."""
        self.zygote = zygote
        self.coordinator = coordinator
        self.directory = directory
        self.records = directory / "records"
        self.job_id = f"job-{uuid.uuid4().hex[:8]}"
        if together > 1:
            max_workers = together  # a full world does not wait for the join grace to pass
        self._spec = coordinator_pb2.JobSpec(
            job_id=self.job_id,
            min_workers=min_workers,
            max_workers=max_workers,
            parameter_servers=servers,
            max_parameter_servers=max_servers,
            parameter_server_backups=backups,
            join_grace_ms=60_000 if together > 1 else 0,
            lease_ms=lease_ms,
            stall_timeout_ms=stall_timeout_ms,
        )
        self.client = self._create_job()
        self._keeps_data = keeps_data
        self.servers: list[Server] = []
        for index in range(servers * (1 + backups)):
            self.start_server()
            if backups:  # the first servers to register become primaries
                eventually(
                    lambda there=index: len(self.job().servers) > there, "a server to register"
                )
        self.workers: list[Worker] = []

    def _create_job(self) -> CoordinatorClient:
        client = CoordinatorClient(
            ChannelSettings(address=self.coordinator.address, deadline=timedelta(seconds=20))
        )
        client.create_job(self._spec)
        return client

    def begin_run(self, **how: Any) -> coordinator_pb2.CreateJobResponse:
        """Begins a new run, as a restarted launcher does.

        how: fields of CreateJob.
        """
        return self.client.create_job(self._spec, **how)

    def start_server(self, **environment: str) -> Server:
        """Starts one more server."""
        server = Server(self, len(self.servers), keeps_data=self._keeps_data, **environment)
        self.servers.append(server)
        return server

    def start_worker(
        self,
        *,
        program: Path | None = None,
        environment: dict[str, str] | None = None,
        **config: Any,
    ) -> Worker:
        """Starts one more worker. `program`: script that reads its configuration from the
        environment; None: train.py."""
        number = len(self.workers)
        directory = self.directory / f"worker-{number}"
        directory.mkdir()
        variables = {
            "SHOAL_COORDINATOR": self.coordinator.address,
            "SHOAL_JOB_ID": self.job_id,
            "SHOAL_MEMBER_ID": f"member-{number}-{uuid.uuid4().hex}",
            "SHOAL_LOCAL_INDEX": str(number),
            "SHOAL_RECORD_DIR": str(self.records),
            "SHOAL_RENDEZVOUS_TIMEOUT_S": "60",
            **(environment or {}),
        }
        configuration = json.dumps({"directory": str(directory), **config})
        if program is None:
            process = self.zygote.start(
                "train", [configuration], output=directory / "log", **variables
            )
        else:
            variables[program.stem.upper()] = configuration
            process = self.zygote.start(
                "script", [str(program)], output=directory / "log", **variables
            )
        worker = Worker(process, directory)
        self.workers.append(worker)
        return worker

    @contextmanager
    def member(self) -> Iterator[Session]:
        """Makes this process a worker of the job, without installing the handlers that run at
        process exit."""
        settings = WorkerSettings(
            coordinator=self.coordinator.address,
            job_id=self.job_id,
            rendezvous_timeout_s=PATIENCE_S,
        )
        identity = MemberIdentity(
            job_id=self.job_id,
            member_id=settings.member_id,
            host="localhost",
            pid=os.getpid(),
        )
        client = CoordinatorClient(ChannelSettings(address=self.coordinator.address))
        session = Session(
            settings,
            Membership(client, identity, settings, host="127.0.0.1"),
            None,
            WorkerMetrics(),
        )
        set_session(session)
        try:
            session.join()
            yield session
        finally:
            set_session(None)
            session.close()

    def job(self) -> coordinator_pb2.GetJobResponse:
        return self.client.get_job(self.job_id)

    def wait_world(self, size: int) -> None:
        eventually(lambda: len(self.job().generation.ranks) == size, f"a world of {size}")

    def close(self) -> None:
        self.client.close()
        processes = [child.process for child in (*self.workers, *self.servers)]
        for process in processes:
            if not process.ended.is_set():
                process.kill()
        for process in processes:
            process.wait()


@contextmanager
def async_cluster(
    zygote: Zygote, coordinator: Coordinator, directory: Path, **settings: Any
) -> Iterator[AsyncCluster]:
    cluster = AsyncCluster(zygote, coordinator, directory, **settings)
    try:
        yield cluster
    finally:
        cluster.close()
