"""The target processes: a coordinator, its Redis, and a parameter server that trains one small
tensor."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Final, Self
from urllib.request import urlopen

import grpc
import numpy as np
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from shoal.launcher.clusters.cluster import LocalCluster
from shoal.launcher.clusters.jobs import JobSettings
from shoal_common.bulk.transport import Transport
from shoal_common.clients.parameter_server import ParameterServerClient
from shoal_common.formats.wire import checksum, encode_push_chunk
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2, parameter_server_pb2

from tests.integration.coordinator.harness import Job
from tests.integration.ps_server.conftest import Member as Pusher

SERVED: Final = "job"
"""The job that must continue throughout."""
OTHER: Final = "other"
"""A job to which anything may happen."""
MEMBER: Final = "m"
_ELEMENTS: Final = 512


class Cluster:
    """A context manager for the cluster. `check` raises AssertionError unless the state is
    unchanged."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        settings = JobSettings(
            job_id=SERVED,
            min_workers=1,
            max_workers=1,
            parameter_servers=1,
            join_grace=timedelta(0),
            lease=timedelta(minutes=10),
        )
        self.local = self._stack.enter_context(LocalCluster(settings))
        client = self.local.client
        client.create_job(
            JobSettings(job_id=OTHER, min_workers=1, max_workers=2, parameter_servers=1).message()
        )
        job = Job(None, client, SERVED)
        (self.member,) = job.form(MEMBER)
        self._stack.callback(self.member.kill)
        tensors = [coordinator_pb2.TensorSpec(name="weight", shape=[_ELEMENTS], dtype="float32")]
        self.shard_map = client.declare_tensors(SERVED, tensors).shard_map
        (self.server,) = self.local.servers
        settings_of_server = ChannelSettings(
            address=self.server.address, deadline=timedelta(seconds=60)
        )
        self.client = self._stack.enter_context(
            ParameterServerClient(settings_of_server, transport=Transport.GRPC)
        )
        # pushes that are accepted must not change the values
        spec = parameter_server_pb2.OptimizerSpec(name="sgd", hyperparameters={"lr": 0.0})
        mode = parameter_server_pb2.Consistency(mode=parameter_server_pb2.Consistency.MODE_ASP)
        self.client.configure_optimizer(SERVED, spec, mode)
        self._pusher = Pusher(self.client, self.shard_map, MEMBER, 1)
        self._pusher.initialize(np.float32(2.5))
        self.processes = {each.name: psutil.Process(each.child.pid) for each in self.local.services}

    @property
    def http(self) -> dict[str, str]:
        """Address (host:port) by service."""
        return {each.name: each.addresses.http for each in self.local.services}

    @property
    def bulk_port(self) -> int:
        return self.client.open_data(SERVED).tcp_port

    def push_message(self) -> bytes:
        """Returns a complete push of the member as one message."""
        payload = np.ones(_ELEMENTS, np.float32)
        (held,) = self.client.get_server(member_id=MEMBER).partitions
        header = self._pusher.header(
            0, checksum=checksum(memoryview(payload)), sequence=held.sequence + 1
        )
        return bytes(encode_push_chunk((header, memoryview(payload).cast("B"))))

    def memory(self) -> dict[str, int]:
        """Returns the memory of each service in bytes."""
        return {name: process.memory_info().rss for name, process in self.processes.items()}

    def check(self) -> None:
        """Checks that the services are alive, healthy and responsive, and have logged no bug of
        their own."""
        for each in self.local.services:
            assert each.child.poll() is None, f"{each.name} has ended: {each.last_words()}"
            with grpc.insecure_channel(each.address) as channel:
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=60
                )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, each.name
            with urlopen(f"http://{each.addresses.http}/metrics", timeout=60) as page:
                assert b"shoal_" in page.read()
            log = each.log.read_text(errors="replace")
            assert "Traceback" not in log, log[log.index("Traceback") :][:4000]
        job = self.local.client.get_job(SERVED)
        assert [member.member_id for member in job.members] == [MEMBER]
        assert (job.generation.number, self.member.ended) == (1, False), (
            "the member has not been evicted"
        )
        values = self._pusher.pull(member_id="")
        assert sum(len(each) for each in values.values()) == 4 * _ELEMENTS
        assert all(
            (np.frombuffer(each.tobytes(), np.float32) == 2.5).all() for each in values.values()
        ), "the server's values must be unchanged"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
