"""Reads a complete model from its parameter servers while it is being trained, for serving,
evaluation and other read-only uses.

Values have the names and shapes of `model.module.named_parameters()` in the workers. Tied
parameters appear once, under the first name. Buffers (e.g. the running statistics of BatchNorm)
belong to each worker and are not on the servers; save them with the checkpoint or recompute them.
Sparse tables are excluded, since their rows are read by id.

Each partition (up to 8 MiB of the model) is consistent and has a version: 1 plus the number of
pushes applied to it. Different partitions may be from slightly different times, as in a worker that
pulls while others push.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Final, Self

import torch
from shoal_common.backoff import Backoff
from shoal_common.clients import parameter_server
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.clients.takeover import TakeoverWatch
from shoal_common.errors import (
    ConfigurationError,
    CorruptDataError,
    DeadlineError,
    PreconditionError,
    ShoalError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2
from shoal_protos.v1 import parameter_server_pb2 as pb

DEFAULT_PATIENCE: Final = timedelta(seconds=30)
_LONGEST_BACKOFF_S: Final = 1.0
_SLOWEST_BYTES_PER_S: Final = 4 << 20
"""Transfer rate, in bytes per second, assumed for the deadline of a pull; a minute is added."""
_CURABLE: Final = (UnavailableError, DeadlineError, CorruptDataError)
_PASSING: Final = frozenset(
    {"TENSORS_UNDECLARED", "STALE_SHARD_MAP", "SHARD_MAP_INCOMPLETE", "PARTITION_UNKNOWN"}
)
"""Reasons of temporary refusals: the job is starting, or its servers are changing."""


class ModelReader:
    """Reads a job's model from its parameter servers repeatedly. Values that have not changed are
    not sent again.

    A token with the reader role is sufficient. A reader is not a member of the job, and no worker
    waits for it. Thread-safe; calls are serialized. A context manager.
    """

    def __init__(
        self, coordinator: ChannelSettings, job_id: str, *, patience: timedelta = DEFAULT_PATIENCE
    ) -> None:
        """Creates a reader, which connects at the first call.

        Args:
            coordinator: address of the coordinator, with the settings for all services (token,
                TLS).
            job_id: id of the job whose model to read.
            patience: how long a call keeps trying while a server or the coordinator is unreachable,
                or while there are no values yet.
        """
        if not job_id:
            raise ConfigurationError("job_id='': expected the id of the job whose model to read")
        if patience < timedelta(0):
            raise ConfigurationError(f"patience={patience!r}: expected a timedelta, 0 or above")
        self._settings = coordinator
        self._job_id = job_id
        self._patience = patience
        self._closed = threading.Event()
        self._coordinator = CoordinatorClient(coordinator)
        self._takeovers = TakeoverWatch(self._ask_where)
        self._reading = threading.Lock()
        """Lock held by the call in progress. It protects the fields below; only `_model` may be
        read without the lock, since it is replaced atomically."""
        self._map: coordinator_pb2.ShardMap | None = None
        self._servers: dict[str, parameter_server.ParameterServerClient] = {}
        """Address -> client of the server."""
        self._model = _Model(tensors={}, versions={})

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the newest values by parameter name, on the CPU, with the declared shapes and
        dtypes. The caller must not modify the tensors. A later call returns new tensors for changed
        values, and the same tensors for unchanged values.

        Raises:
            DeadlineError: a server or the values were not available within `patience`; the message
                states which. A job has no values before its workers' first step
                (PARTITION_UNINITIALIZED, TENSORS_UNDECLARED).
            UnknownResourceError: there is no such job.
            AuthenticationError, PermissionDeniedError: the token is not accepted.
        """
        with self._reading:
            self._retry_until()
            return dict(self._model.tensors)

    @property
    def versions(self) -> Mapping[int, int]:
        """Version of each partition in the last result of `state_dict`, by partition id; empty
        before the first call."""
        return dict(self._model.versions)

    def close(self) -> None:
        """Aborts calls in progress and closes all connections. Idempotent."""
        self._closed.set()
        self._coordinator.close()
        for client in list(self._servers.values()):
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---------------------------------------------------------------------------- calls in progress

    def _retry_until(self) -> None:
        deadline = time.monotonic() + self._patience.total_seconds()
        backoff = Backoff(longest_s=_LONGEST_BACKOFF_S)
        while True:
            if self._closed.is_set():
                raise UnavailableError(
                    "this reader is closed; create a new one", reason="CLIENT_CLOSED"
                )
            try:
                if self._map is None:
                    self._learn()
                return self._read()
            except ShoalError as error:
                if self._closed.is_set():
                    continue
                if not isinstance(error, _CURABLE) and error.reason not in _PASSING:
                    raise
                # a restarted server may listen at a different address, and partitions may have
                # moved
                self._map = None
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"could not read the model of job {self._job_id!r} within "
                        f"{self._patience.total_seconds():g} s: {error}. There are no values "
                        "before the workers' first step; wait, or pass a longer patience",
                        reason=error.reason,
                    ) from error
                wait_s = backoff.next_s(error)
            self._closed.wait(min(wait_s, max(0.0, deadline - time.monotonic())))

    def _learn(self) -> None:
        """Requests the assignment of partitions to servers, and the servers' addresses, from the
        coordinator."""
        shard_map = self._coordinator.get_shard_map(self._job_id).shard_map
        holders = {partition.primary for partition in shard_map.partitions}
        addresses = {
            each.server_index: each.address
            for each in shard_map.servers
            if each.server_index in holders and each.address
        }
        missing = sorted(holders - addresses.keys())
        if missing:
            raise PreconditionError(
                f"parameter servers {missing} of job {self._job_id!r} are not registered with "
                "the coordinator; start them",
                reason="SHARD_MAP_INCOMPLETE",
            )
        for address in self._servers.keys() - addresses.values():
            self._servers.pop(address).close()
        for address in addresses.values():
            if address in self._servers and not self._servers[address].is_closed:
                continue
            self._servers[address] = client = parameter_server.ParameterServerClient(
                replace(self._settings, address=address, attempts=1)
            )
            self._takeovers.add(client)
            if self._closed.is_set():  # `close` may have run before this client was registered
                client.close()
        self._map = shard_map

    def _ask_where(self) -> coordinator_pb2.ShardMap | None:
        try:
            return self._coordinator.get_shard_map(self._job_id).shard_map
        except ShoalError:
            return None

    def _read(self) -> None:
        """Replaces the model by its newest values. If this fails, the model stays unchanged."""
        assert self._map is not None
        before = self._model
        if before.layout != (layout := _layout_of(self._map)):
            before = _Model(tensors={}, versions={}, layout=layout)
        shares: dict[int, list[coordinator_pb2.Partition]] = {}
        for partition in self._map.partitions:
            if not partition.HasField("bucket"):
                shares.setdefault(partition.primary, []).append(partition)
        addresses = {server.server_index: server.address for server in self._map.servers}
        making = _Making(self._map, before)
        with ThreadPoolExecutor(
            max_workers=max(1, len(shares)), thread_name_prefix="shoal-reader"
        ) as pool:
            reads = [
                pool.submit(self._read_server, addresses[index], share, making)
                for index, share in shares.items()
            ]
        for read in reads:
            read.result()
        self._model = making.finished()

    def _read_server(
        self, address: str, share: list[coordinator_pb2.Partition], making: _Making
    ) -> None:
        """Reads the changed values of the partitions in `share`, which are on one server, into the
        model that is being made."""
        try:
            behind = self._pull(address, share, making, making.before.versions)
            if behind:
                # The server has lost recent versions, so all its current values are read.
                self._pull(
                    address, [each for each in share if each.partition_id in behind], making, {}
                )
        except UnknownResourceError as error:
            if error.reason == "JOB_UNKNOWN":
                raise UnavailableError(
                    f"the server at {address} now belongs to another job: {error}"
                ) from error
            raise

    def _pull(
        self,
        address: str,
        share: list[coordinator_pb2.Partition],
        making: _Making,
        held: Mapping[int, int],
    ) -> frozenset[int]:
        """Pulls the changed partitions in `share` from a server. `held`: version of each partition
        that this reader already has. Returns the ids of the partitions for which the server's
        version is older than that."""
        assert self._map is not None
        request = pb.PullRequest(
            job_id=self._job_id,
            shard_map_epoch=self._map.epoch,
            partitions=[
                pb.PartitionPull(
                    partition_id=p.partition_id, newer_than=held.get(p.partition_id, 0)
                )
                for p in share
            ],
            checksums=True,
        )
        deadline = timedelta(seconds=60 + sum(map(making.bytes_of, share)) / _SLOWEST_BYTES_PER_S)
        headers = self._servers[address].pull(request, making.memory, deadline=deadline)
        making.take(headers)
        return frozenset(
            h.partition_id
            for h in headers
            if h.unchanged and h.version < held.get(h.partition_id, 0)
        )


class ParameterServerClient(parameter_server.ParameterServerClient):
    """Client of one parameter server, with one method per RPC. In addition, `state_dict` reads a
    model from all servers of a job."""

    @staticmethod
    def state_dict(
        coordinator: ChannelSettings, job_id: str, *, patience: timedelta = DEFAULT_PATIENCE
    ) -> dict[str, torch.Tensor]:
        """Returns a job's complete current model. For repeated reads, use a `ModelReader`, which
        has the same arguments and errors."""
        with ModelReader(coordinator, job_id, patience=patience) as reader:
            return reader.state_dict()


_Layout = tuple[tuple[object, ...], ...]


def _layout_of(shard_map: coordinator_pb2.ShardMap) -> _Layout:
    """Returns a value that is equal for two shard maps if they divide the same tensors into the
    same partitions, regardless of the servers."""
    tensors = tuple(
        (tensor.name, tuple(tensor.shape), tensor.dtype) for tensor in shard_map.tensors
    )
    pieces = tuple(
        tuple((p.tensor_index, p.offset, p.length) for p in each.pieces)
        for each in shard_map.partitions
    )
    return tensors, pieces


@dataclass(frozen=True, kw_only=True)
class _Model:
    """A model that has been read. Its tensors are never modified."""

    tensors: Mapping[str, torch.Tensor]
    versions: Mapping[int, int]
    layout: _Layout = ()


class _Making:
    """The next model, while the threads that read from the servers are assembling it."""

    def __init__(self, shard_map: coordinator_pb2.ShardMap, before: _Model) -> None:
        self.before = before
        self._map = shard_map
        self._versions = dict(before.versions)
        self._flat: dict[str, torch.Tensor] = {}
        """Tensors with changed values, flattened to one dimension."""
        self._parts: dict[int, torch.Tensor] = {}
        """Partitions being received, flattened to one dimension."""
        self._lock = threading.Lock()

    def bytes_of(self, partition: coordinator_pb2.Partition) -> int:
        """Returns the size of a partition's values in bytes."""
        return self._length(partition) * self._dtype(partition).itemsize

    def memory(self, header: pb.PullHeader) -> memoryview:
        """Returns the memory for a partition to be received."""
        partition = self._map.partitions[header.partition_id]
        part = torch.empty(self._length(partition), dtype=self._dtype(partition))
        with self._lock:
            self._parts[header.partition_id] = part
        memory: memoryview = part.view(torch.uint8).numpy().data
        return memory

    def take(self, headers: list[pb.PullHeader]) -> None:
        """Adds partitions that have been received completely."""
        with self._lock:
            for header in headers:
                if not header.unchanged:
                    self._versions[header.partition_id] = header.version
                    self._place(
                        self._map.partitions[header.partition_id],
                        self._parts.pop(header.partition_id),
                    )

    def finished(self) -> _Model:
        """Returns the finished model. Also creates tensors without elements, which are in no
        partition."""
        dense = [tensor for tensor in self._map.tensors if not tensor.HasField("table")]
        shapes = {tensor.name: tuple(tensor.shape) for tensor in dense}
        empty = {
            t.name: torch.empty(tuple(t.shape), dtype=_torch_dtype(t))
            for t in dense
            if 0 in t.shape
        }
        changed = {name: flat.reshape(shapes[name]) for name, flat in self._flat.items()}
        known = {**empty, **self.before.tensors, **changed}
        tensors = {tensor.name: known[tensor.name] for tensor in dense}
        return _Model(tensors=tensors, versions=self._versions, layout=self.before.layout)

    def _place(self, partition: coordinator_pb2.Partition, part: torch.Tensor) -> None:
        for piece, values in zip(
            partition.pieces, part.split([piece.length for piece in partition.pieces]), strict=True
        ):
            spec = self._map.tensors[piece.tensor_index]
            if spec.name not in self._flat:
                old = self.before.tensors.get(spec.name)
                length = torch.Size(spec.shape).numel()
                self._flat[spec.name] = (
                    torch.empty(length, dtype=part.dtype)
                    if old is None
                    else old.reshape(-1).clone()
                )
            self._flat[spec.name][piece.offset : piece.offset + piece.length] = values

    def _length(self, partition: coordinator_pb2.Partition) -> int:
        return sum(piece.length for piece in partition.pieces)

    def _dtype(self, partition: coordinator_pb2.Partition) -> torch.dtype:
        return _torch_dtype(self._map.tensors[partition.pieces[0].tensor_index])


def _torch_dtype(spec: coordinator_pb2.TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype)
    assert isinstance(dtype, torch.dtype), "the coordinator knows the names"
    return dtype
