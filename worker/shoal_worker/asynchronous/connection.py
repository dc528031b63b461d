"""A worker's connection to one parameter server: its identity, partitions, address and client.

This module finds a server again after it has moved or restarted. The calls and their retries are
elsewhere (server_link.py, persistence.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final

from shoal_common.errors import UnavailableError
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_worker.asynchronous.delivery import ShardMapChanged
from shoal_worker.asynchronous.job import Job
from shoal_worker.asynchronous.tensors import Partition, ServerShare

_SLOWEST_BYTES_PER_S: Final = 4 << 20
"""Transfer rate assumed for a stream's deadline, in addition to a fixed minute."""


class Connection:
    """Used by one thread at a time, except for `close`."""

    def __init__(self, job: Job, share: ServerShare) -> None:
        """Does not connect yet."""
        self._job = job
        self.address = share.address
        """Address of the server."""
        self.client = job.server_client(share.address)
        self._closed = False
        self.adopt(share)

    def adopt(self, share: ServerShare) -> None:
        """Adopts the server's share from the newest shard map. Called between calls."""
        self.share = share
        self.partitions: Mapping[int, Partition] = {
            partition.partition_id: partition for partition in share.partitions
        }
        self.trained: Sequence[Partition] = [
            partition for partition in share.partitions if partition.trained
        ]
        self._stored_bytes = sum(partition.size_bytes for partition in share.partitions)

    def stream_deadline(self, more_bytes: int = 0) -> timedelta:
        """Returns the time allowed for a stream of all values of this worker's tensors on the
        server, plus `more_bytes`."""
        return timedelta(seconds=60 + (self._stored_bytes + more_bytes) / _SLOWEST_BYTES_PER_S)

    def find(self) -> None:
        """Looks up the server's current address, which may change after a restart. Raises
        ShardMapChanged if partitions have moved, and UnavailableError if their server is not
        registered yet."""
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
                    f"servers {missing}, which have partitions now, are not registered",
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
                f"at {self.address} there is server {state.server_index} of job {state.job_id!r}, "
                f"not server {self.share.index} of {self._job.job_id!r}"
            )
        return state

    def close(self) -> None:
        """Ends calls in progress. Idempotent. Any thread may call it."""
        self._closed = True
        self.client.close()
