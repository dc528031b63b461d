"""Two servers, the real coordinator and real worker sessions: the servers receive the shard map,
the membership and the end of the job."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta

import numpy as np
import pytest
import trustme
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import StaleGenerationError, UnavailableError
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.security.authentication import TlsSettings
from shoal_common.system.own_address import name_for_others
from shoal_common.system.processes import tied_to_parent
from shoal_protos.v1 import coordinator_pb2
from shoal_protos.v1 import parameter_server_pb2 as pb

JOB = "job"


@pytest.fixture
def coordinator(tmp_path, cluster) -> Iterator[Callable[..., str]]:
    """coordinator(*flags) -> the address of a coordinator process with its own Redis."""
    port_file = tmp_path / "coordinator-port"
    processes: list[subprocess.Popen[bytes]] = []

    def start(*flags: str) -> str:
        command = [
            sys.executable,
            "-m",
            "shoal_coordinator",
            "--redis",
            "embedded://",
            "--port-file",
            str(port_file),
            *flags,
        ]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")
        }
        processes.append(subprocess.Popen(tied_to_parent(command), env=environment))
        cluster.wait_until(port_file.exists, "the coordinator to serve")
        return json.loads(port_file.read_text())["grpc"]

    yield start
    for process in processes:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


class Session:
    """A worker's session, which stays open until `leave`."""

    def __init__(self, client: CoordinatorClient) -> None:
        self.member_id = uuid.uuid4().hex
        self.generations: queue.Queue[coordinator_pb2.Generation] = queue.Queue()
        self._outbox: queue.Queue[coordinator_pb2.MemberMessage | None] = queue.Queue()
        join = coordinator_pb2.Join(
            job_id=JOB,
            member_id=self.member_id,
            host="here",
            pid=os.getpid(),
            launcher_id=self.member_id,
        )
        self._outbox.put(coordinator_pb2.MemberMessage(join=join))
        self._outbox.put(coordinator_pb2.MemberMessage(ready=coordinator_pb2.Ready()))
        self._directives = client.join_session(iter(self._outbox.get, None))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        for directive in self._directives:
            if directive.HasField("generation"):
                self.generations.put(directive.generation)

    def leave(self, reason: int = coordinator_pb2.Leave.REASON_FAILED) -> None:
        self._outbox.put(coordinator_pb2.MemberMessage(leave=coordinator_pb2.Leave(reason=reason)))
        self._outbox.put(None)
        self._thread.join(30)
        self._directives.cancel()


def test_two_servers_share_a_model_and_follow_the_jobs_members(cluster, coordinator) -> None:
    address = coordinator()
    with CoordinatorClient(ChannelSettings(address=address)) as client:
        _train(cluster, client, address)


def test_tokens_and_mutual_tls_are_enforced_between_all_three(
    cluster, coordinator, tmp_path
) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    files = {name: tmp_path / f"{name}.pem" for name in ("authority", "certificate", "key")}
    authority.cert_pem.write_to_path(files["authority"])
    issued.cert_chain_pems[0].write_to_path(files["certificate"])
    issued.private_key_pem.write_to_path(files["key"])
    (tmp_path / "tokens").write_text("admin: at\nserver: st\nviewer: vt\n")
    served = {
        "tls_cert": files["certificate"],
        "tls_key": files["key"],
        "tls_client_ca": files["authority"],
        "tokens": tmp_path / "tokens",
    }
    address = coordinator(
        *(
            text
            for name, path in served.items()
            for text in (f"--{name.replace('_', '-')}", str(path))
        )
    )
    tls = TlsSettings(**files)
    with CoordinatorClient(ChannelSettings(address=address, tls=tls, token="at")) as client:
        client.create_job(
            coordinator_pb2.JobSpec(job_id=JOB, min_workers=1, max_workers=1, parameter_servers=1)
        )
        cluster.unregistered(coordinator=address, token="st", tls_ca=files["authority"], **served)
        status = cluster.wait_until(
            lambda: [each for each in client.get_job(JOB).servers if each.alive],
            "the server to be registered",
        )[0]
    viewer = cluster.client(cluster.running, tls=tls, token="vt")
    assert (viewer.get_server().server_id, status.address) == ("server", cluster.running.address)
    stranger = cluster.client(
        cluster.running, tls=TlsSettings(authority=files["authority"]), token="vt", attempts=1
    )
    with pytest.raises(UnavailableError):
        stranger.get_server()


def _train(cluster, coordinator: CoordinatorClient, address: str) -> None:
    spec = coordinator_pb2.JobSpec(
        job_id=JOB,
        min_workers=1,
        max_workers=2,
        parameter_servers=2,
        join_grace_ms=60_000,
        lease_ms=60_000,
    )
    coordinator.create_job(spec)
    clients = [
        cluster.unregistered(coordinator=address, server_id=f"server-{number}")
        for number in range(2)
    ]
    first, second = Session(coordinator), Session(coordinator)
    generation = first.generations.get(timeout=30)
    assert {rank.member_id for rank in generation.ranks} == {first.member_id, second.member_id}

    tensors = [
        coordinator_pb2.TensorSpec(name="weight", shape=[3, 1 << 20], dtype="float32"),
        coordinator_pb2.TensorSpec(name="bias", shape=[1000], dtype="float32"),
    ]
    shard_map = cluster.wait_until(
        lambda: _declared(coordinator, tensors), "both servers to be registered"
    )
    by_index = {
        server.server_index: clients[int(server.server_id[-1])] for server in shard_map.servers
    }
    held = {
        index: [each for each in shard_map.partitions if each.primary == index]
        for index in by_index
    }
    assert all(held.values())

    for index, client in by_index.items():
        client.configure_optimizer(
            JOB, pb.OptimizerSpec(name="sgd"), pb.Consistency(mode=pb.Consistency.MODE_ASP)
        )
        for session, sequence in ((first, 0), (first, 1), (second, 1)):
            uploads = [
                _upload(session, generation.number, shard_map, partition, sequence)
                for partition in held[index]
            ]
            (client.push if sequence else client.initialize)(uploads)
        assert [each.version for each in client.get_server().partitions] == [3] * len(held[index])
        assert set(client.get_server().clocks) == {first.member_id, second.member_id}

    second.leave()
    for index, client in by_index.items():
        cluster.wait_until(
            lambda client=client: second.member_id not in client.get_server().clocks,
            "the servers to hear that one left",
        )
        client.push([_upload(first, generation.number, shard_map, held[index][0], 2)])
        with pytest.raises(StaleGenerationError):
            client.push([_upload(second, generation.number, shard_map, held[index][0], 2)])

    coordinator.stop_job(JOB, reason="the test is over")
    first.leave(coordinator_pb2.Leave.REASON_FINISHED)
    for running in cluster.all_running:
        running.thread.join(30)
        assert not running.thread.is_alive()
        assert running.failure is None


def _declared(coordinator: CoordinatorClient, tensors) -> coordinator_pb2.ShardMap | None:
    try:
        return coordinator.declare_tensors(JOB, tensors, deadline=timedelta(seconds=5)).shard_map
    except UnavailableError:
        return None


def _upload(
    session: Session,
    generation: int,
    shard_map: coordinator_pb2.ShardMap,
    partition: coordinator_pb2.Partition,
    sequence: int,
):
    length = sum(piece.length for piece in partition.pieces)
    header = pb.PushHeader(
        job_id=JOB,
        member_id=session.member_id,
        generation=generation,
        partition_id=partition.partition_id,
        shard_map_epoch=shard_map.epoch,
        sequence=sequence,
        base_version=min(sequence, 1),
        clock=sequence,
        dtype=pb.DTYPE_FLOAT32,
        codec=pb.CODEC_RAW,
        length=length,
        payload_bytes=4 * length,
    )
    return header, memoryview(np.ones(length, np.float32))


def test_server_on_all_addresses_advertises_its_name_if_others_can_resolve_it(cluster) -> None:
    cluster.server(listen="0.0.0.0:0", insecure=True)
    assert cluster.running.settings.advertised(1) == f"{name_for_others() or '127.0.0.1'}:1"
