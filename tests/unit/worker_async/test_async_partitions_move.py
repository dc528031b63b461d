"""A worker when partitions move at critical moments, which only scripted servers can choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from shoal_common.clients.parameter_server import ParameterServerClient
from shoal_common.errors import PreconditionError, UnavailableError
from shoal_protos.v1 import coordinator_pb2
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.parameter_servers.coordination.job import Job
from shoal_worker.parameter_servers.coordination.server_waits import ServerWaits
from shoal_worker.parameter_servers.options import AsyncOptions, Revision, ServerOptimizer
from shoal_worker.parameter_servers.servers import ParameterServers
from shoal_worker.parameter_servers.tensors import HostTensor, Iteration, Payloads
from torch import nn

NAMES = ("a", "b")
"""Names of the tensors. Each tensor is one partition, numbered by its position."""


@dataclass
class Held:
    """A partition, no matter which server has it."""

    version: int = 1
    value: float = 1.0
    sequence: int = 0


@dataclass
class Cluster:
    """Servers 0, 1 and 2, with all their partitions in one list."""

    epoch: int = 1
    owners: list[int] = field(default_factory=lambda: [0, 1])
    held: list[Held] = field(default_factory=lambda: [Held(), Held()])
    received: list[tuple[int, str]] = field(default_factory=list)
    """Pairs of a server and the call that it received."""
    moving: set[int] = field(default_factory=set)
    """Partitions that are moving to another server."""
    looked: Callable[[], None] = lambda: None
    """Called after a server has reported its partitions."""
    before: Callable[[int, str], None] = lambda server, what: None
    """Called before a server answers."""

    def move(self, partition: int, *, to: int) -> None:
        self.owners[partition] = to
        self.epoch += 1

    def shard_map(self) -> coordinator_pb2.ShardMap:
        pieces = [
            coordinator_pb2.Piece(tensor_index=index, offset=0, length=2)
            for index in range(len(NAMES))
        ]
        return coordinator_pb2.ShardMap(
            epoch=self.epoch,
            tensors=[
                coordinator_pb2.TensorSpec(name=name, shape=[2], dtype="float32") for name in NAMES
            ],
            partitions=[
                coordinator_pb2.Partition(partition_id=number, primary=owner, pieces=[piece])
                for number, (owner, piece) in enumerate(zip(self.owners, pieces, strict=True))
            ],
            servers=[
                coordinator_pb2.ServerStatus(server_index=index, address=f"server-{index}:1")
                for index in range(3)
            ],
        )


class Client:
    """A client of one server of the cluster."""

    def __init__(self, cluster: Cluster, server: int) -> None:
        self._cluster, self._server = cluster, server
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True

    def get_server(self, member_id: str = "") -> pb.GetServerResponse:
        mine = [
            (number, each)
            for number, each in enumerate(self._cluster.held)
            if self._cluster.owners[number] == self._server
        ]
        versions = [
            pb.PartitionVersion(
                partition_id=number,
                version=each.version,
                sequence=each.sequence,
                moving=number in self._cluster.moving,
            )
            for number, each in mine
        ]
        self._cluster.looked()
        return pb.GetServerResponse(
            job_id="job",
            server_index=self._server,
            optimizer=pb.OptimizerSpec(name="sgd"),
            partitions=versions,
        )

    def advance_clock(
        self,
        job_id: str,
        member_id: str,
        *,
        has_read: bool = False,
        shard_map_epoch: int = 0,
        **more: Any,
    ) -> None:
        self._answers("has_read" if has_read else "clock", shard_map_epoch or self._cluster.epoch)

    def push(
        self, outgoing: Iterable[tuple[pb.PushHeader, memoryview]], *, deadline: timedelta
    ) -> list[pb.PartitionResult]:
        results = []
        for header, _ in outgoing:
            if header.partition_id in self._cluster.moving:
                raise UnavailableError(
                    "it is moving", reason="PARTITION_MOVING", retry_after=timedelta(milliseconds=1)
                )
            self._answers("push", header.shard_map_epoch)
            held = self._cluster.held[header.partition_id]
            duplicate = header.sequence <= held.sequence
            if not duplicate:
                held.sequence, held.version = header.sequence, held.version + 1
            results.append(
                pb.PartitionResult(
                    partition_id=header.partition_id, version=held.version, duplicate=duplicate
                )
            )
        return results

    def pull(
        self,
        request: pb.PullRequest,
        room: Callable[[pb.PullHeader], memoryview],
        *,
        deadline: timedelta,
    ) -> list[pb.PullHeader]:
        self._answers("pull", request.shard_map_epoch)
        headers = []
        for asked in request.partitions:
            held = self._cluster.held[asked.partition_id]
            header = pb.PullHeader(
                partition_id=asked.partition_id,
                version=held.version,
                unchanged=held.version <= asked.newer_than,
                codec=pb.CODEC_RAW,
            )
            if not header.unchanged:
                room(header)[:] = torch.full((2,), held.value).view(torch.uint8).numpy().data
            headers.append(header)
        return headers

    def _answers(self, what: str, epoch: int) -> None:
        self._cluster.before(self._server, what)
        if epoch != self._cluster.epoch:
            raise PreconditionError("partitions have moved", reason="STALE_SHARD_MAP")
        self._cluster.received.append((self._server, what))


@contextmanager
def member_of(cluster: Cluster) -> Iterator[tuple[ParameterServers, Mapping[str, nn.Parameter]]]:
    """Yields a worker under bsp that has pulled the first values of all partitions."""
    parameters = {name: nn.Parameter(torch.zeros(2)) for name in NAMES}
    job = SimpleNamespace(
        job_id="job",
        member_id="member",
        generation=1,
        rank=1,
        leaving=False,
        straggler_patience=timedelta(seconds=9),
        shard_map=cluster.shard_map,
        waits=ServerWaits(),
        server_client=lambda address: cast(
            ParameterServerClient, Client(cluster, int(address.split(":")[0][-1]))
        ),
    )
    servers = ParameterServers(
        cast(Job, job),
        cluster.shard_map(),
        [HostTensor(name, parameter, trained=True) for name, parameter in parameters.items()],
        cast(ServerOptimizer, SimpleNamespace(spec=None)),
        AsyncOptions(consistency="bsp"),
        WorkerMetrics(),
    )
    try:
        servers.start(has_values=False)
        cluster.received.clear()
        yield servers, parameters
    finally:
        servers.close()


def iteration(*, batch: int = 0, pull: bool = True) -> Iteration:
    gradients = {name: torch.ones(2) for name in NAMES}
    return Iteration(
        clock=1, revision=Revision(number=0, groups=()), gradients=gradients, pull=pull, batch=batch
    )


def test_bsp_pulls_nothing_again_that_others_may_have_pushed_to_since() -> None:
    cluster = Cluster()

    def move_while_the_other_continues(server: int, what: str) -> None:
        if (server, what) == (1, "pull") and cluster.epoch == 1:
            while (0, "has_read") not in cluster.received:
                pass  # waits until the other server's thread removes it
            cluster.move(1, to=2)
            # the next iteration of another member
            cluster.held[0] = Held(version=9, value=99.0, sequence=cluster.held[0].sequence)

    with member_of(cluster) as (servers, parameters):
        cluster.before = move_while_the_other_continues
        cluster.held[0].value = cluster.held[1].value = 2.0
        servers.exchange(iteration())
        assert [parameters[name].tolist() for name in NAMES] == [[2.0, 2.0], [2.0, 2.0]]
        assert (2, "has_read") in cluster.received


def test_push_before_a_partition_moved_leaves_no_residual_as_if_pushed_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A push that was given up although its server had applied it is settled as applied. The
    repeated push, before which the partition moves, is settled as not applied."""
    cluster = Cluster()
    settled: list[tuple[int, bool]] = []

    def settle(payloads: Payloads, partitions: Iterable[int], *, applied: Iterable[int]) -> None:
        settled.extend((partition, partition in set(applied)) for partition in partitions)

    monkeypatch.setattr(Payloads, "settle", settle)

    def move_before_the_push(server: int, what: str) -> None:
        if (server, what) == (1, "push") and cluster.epoch == 1:
            cluster.move(1, to=2)

    with member_of(cluster) as (servers, _):
        servers._ledger.begun([1], batch=7)
        cluster.held[1] = Held(version=2, sequence=1)
        cluster.before = move_before_the_push
        servers.exchange(iteration(batch=7, pull=False))
        assert [applied for partition, applied in settled if partition == 1] == [True, False]


def test_partitions_before_a_moving_one_in_a_push_are_not_sent_repeatedly() -> None:
    cluster = Cluster(owners=[0, 0])
    looks: list[int] = []

    def arrives_in_the_end() -> None:
        looks.append(len(looks))
        if len(looks) == 4:
            cluster.moving.clear()
            cluster.move(1, to=2)

    with member_of(cluster) as (servers, _):
        cluster.moving.add(1)
        cluster.looked = arrives_in_the_end
        servers.exchange(iteration(pull=False))
        assert len(looks) >= 4
        # once before the move and once after it
        assert [received for received in cluster.received if received[1] == "push"].count(
            (0, "push")
        ) == 2
        assert [each.sequence for each in cluster.held] == [1, 1]


def test_server_with_the_index_of_a_drained_one_is_contacted_at_its_own_address() -> None:
    cluster = Cluster()
    with member_of(cluster) as (servers, _):
        moved = cluster.shard_map()
        moved.epoch += 1
        moved.servers[1].address = "server-2:1"
        servers._deal_out(moved)
        assert [link.address for link in servers._links] == ["server-0:1", "server-2:1"]
