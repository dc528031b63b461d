"""A worker's connection to one parameter server: the server's identity, partitions, address and
client, and single attempts to pull values from it.

`Connection` finds the server again after it has moved or restarted. `Pulls` sends the requests and
stores the received values. Other modules decide when to call and when to retry (server_link.py,
persistence.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final

import torch
from shoal_common.errors import UnavailableError
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_worker.parameter_servers.coordination.job import Job
from shoal_worker.parameter_servers.ledger import Ledger, ShardMapChanged
from shoal_worker.parameter_servers.tensors import (
    Partition,
    PulledValues,
    ServerShare,
    tensor_bytes,
)

_SLOWEST_BYTES_PER_S: Final = 4 << 20
"""Assumed transfer rate for the deadline of a stream, in bytes per second. A minute is added to
that deadline."""


class Connection:
    """Connection to one parameter server. Except for `close`, it may be used by only one thread at
    a time."""

    def __init__(self, job: Job, share: ServerShare) -> None:
        """Creates a connection to the server with the partitions in `share`. Does not connect
        yet."""
        self._job = job
        self.address = share.address
        """Address of the server."""
        self.client = job.server_client(share.address)
        self._closed = False
        self.adopt(share)

    def adopt(self, share: ServerShare) -> None:
        """Replaces the list of the server's partitions with the list in the newest shard map. Must
        not be called during another call."""
        self.share = share
        self.partitions: Mapping[int, Partition] = {
            partition.partition_id: partition for partition in share.partitions
        }
        self.trained: Sequence[Partition] = [
            partition for partition in share.partitions if partition.trained
        ]
        self._stored_bytes = sum(partition.size_bytes for partition in share.partitions)

    def stream_deadline(self, more_bytes: int = 0) -> timedelta:
        """Returns how long a transfer of all of this worker's tensors to or from the server may
        take. `more_bytes`: bytes to transfer in addition."""
        return timedelta(seconds=60 + (self._stored_bytes + more_bytes) / _SLOWEST_BYTES_PER_S)

    def find(self) -> None:
        """Looks up the server's current address, which changes if the server restarts elsewhere.

        Raises:
            ShardMapChanged: partitions have moved.
            UnavailableError: the server is not registered yet.
        """
        shard_map = self._job.shard_map()
        if shard_map is None:
            return
        addresses = {
            server.server_index: server.address for server in shard_map.servers if server.address
        }
        if shard_map.epoch > self.share.epoch:
            if missing := sorted(
                {partition.primary for partition in shard_map.partitions} - addresses.keys()
            ):
                raise UnavailableError(
                    f"parameter servers {missing} own partitions but are not registered with the "
                    "coordinator",
                    reason="SHARD_MAP_INCOMPLETE",
                )
            raise ShardMapChanged(shard_map)
        address = addresses.get(self.share.index, self.address)
        if address != self.address or (self.client.is_closed and not self._closed):
            self.client.close()
            self.address = address
            self.client = self._job.server_client(address)

    def look(self) -> pb.GetServerResponse:
        state = self.client.get_server(member_id=self._job.member_id)
        if state.job_id != self._job.job_id or state.server_index not in (-1, self.share.index):
            raise UnavailableError(
                f"the server at {self.address} is server {state.server_index} of job "
                f"{state.job_id!r}; expected server {self.share.index} of job {self._job.job_id!r}"
            )
        return state

    def close(self) -> None:
        """Cancels calls in progress. Idempotent. May be called from any thread."""
        self._closed = True
        self.client.close()


TURN_WAIT: Final = timedelta(seconds=5)
"""Interval between checks whether this worker should leave, while it waits for slower workers (ssp
and bsp)."""


class Pulls:
    """Pulls values from one server, without retries. May be used by only one thread at a time."""

    def __init__(
        self, job: Job, connection: Connection, ledger: Ledger, *, compression: str | None
    ) -> None:
        """`compression`: compression of values, as in `AsyncOptions.pull_compression`."""
        self._job = job
        self._connection = connection
        self._ledger = ledger
        self._incoming = PulledValues(compression)

    def pull(
        self,
        partitions: Sequence[Partition],
        *,
        clock: int | None,
        wait: timedelta = TURN_WAIT,
        codec: pb.Codec | None = None,
    ) -> None:
        """Pulls newer values into the tensors' host memory.

        `clock`: number of iterations finished by this member; None: the member pulls as an
        observer, without waiting for other workers. `codec`: codec of the values; None: the codec
        in the options.
        """
        if not partitions:
            return  # an empty request would be a request for all partitions
        held = {each.partition_id: self._ledger.held(each.partition_id) for each in partitions}
        request = self._request(partitions, held, clock=clock, wait=wait)
        request.codec = self._incoming.codec if codec is None else codec
        tensors = {
            piece.tensor.name: piece.tensor
            for partition in partitions
            for piece in partition.pieces
        }
        memory = {name: tensor.target() for name, tensor in tensors.items()}
        self._ledger.pulled(
            self._receive(request, memory, deadline=self._connection.stream_deadline() + wait)
        )

    def pull_ahead(
        self, partitions: Sequence[Partition], memory: Mapping[str, torch.Tensor], *, clock: int
    ) -> list[tuple[Partition, pb.PullHeader]]:
        """Pulls newer values into separate flat host tensors (name -> tensor). The values that
        training uses remain unchanged. `clock`: see `pull`."""
        if not partitions:
            return []
        held = {each.partition_id: self._ledger.held(each.partition_id) for each in partitions}
        request = self._request(partitions, held, clock=clock, wait=TURN_WAIT)
        request.codec = self._incoming.codec
        headers = self._receive(request, memory, deadline=self._connection.stream_deadline())
        return [(self._connection.partitions[header.partition_id], header) for header in headers]

    def read(self, into: Mapping[str, torch.Tensor]) -> None:
        """Reads all values into separate flat host tensors (name -> tensor). The values that
        training uses remain unchanged."""
        request = self._request(
            list(self._connection.partitions.values()), {}, clock=None, wait=TURN_WAIT
        )
        self._receive(request, into, deadline=self._connection.stream_deadline())

    def _receive(
        self, request: pb.PullRequest, memory: Mapping[str, torch.Tensor], *, deadline: timedelta
    ) -> list[pb.PullHeader]:
        """Pulls values into flat tensors. `memory`: name -> tensor."""
        compressed: dict[int, torch.Tensor] = {}

        def room(header: pb.PullHeader) -> memoryview:
            partition = self._connection.partitions[header.partition_id]
            if header.codec == pb.CODEC_RAW:
                return tensor_bytes(partition.landing(memory))
            compressed[partition.partition_id] = self._incoming.room(header.codec, partition.length)
            return tensor_bytes(compressed[partition.partition_id])

        headers = self._connection.client.pull(request, room, deadline=deadline)
        for header in headers:
            if not header.unchanged:
                partition = self._connection.partitions[header.partition_id]
                if (payload := compressed.get(header.partition_id)) is not None:
                    self._incoming.decode(payload, partition.landing(memory))
                partition.landed(memory)
        return headers

    def _request(
        self,
        partitions: Sequence[Partition],
        held: Mapping[int, int],
        *,
        clock: int | None,
        wait: timedelta,
    ) -> pb.PullRequest:
        return pb.PullRequest(
            job_id=self._job.job_id,
            member_id=self._job.member_id if clock is not None else "",
            generation=self._job.generation if clock is not None else 0,
            shard_map_epoch=self._connection.share.epoch,
            partitions=[
                pb.PartitionPull(
                    partition_id=each.partition_id, newer_than=held.get(each.partition_id, 0)
                )
                for each in partitions
            ],
            clock=clock or 0,
            wait_ms=round(wait.total_seconds() * 1000),
        )
