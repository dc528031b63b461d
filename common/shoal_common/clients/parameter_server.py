"""Client of one parameter server: one method for each RPC of shoal.v1.ParameterServer, with the
same name in snake_case.

Tensors travel over a bulk channel (shoal_common.clients.bulk) if one is available, otherwise over
gRPC (shoal_common.formats.wire). In both cases payloads are sent from the caller's buffers, and
pulled payloads are written directly into them. Clients are synchronous and thread-safe; never use a
client in a forked child. Every method raises ShoalErrors: those documented for each RPC in the
.proto, and UnavailableError or DeadlineError if the server cannot be reached. `deadline` replaces
ChannelSettings.deadline.

The caller must know which server has which partition, and must retry failed pushes itself. This is
safe because pushes have sequence numbers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import grpc
import xxhash
from grpc_health.v1 import health_pb2, health_pb2_grpc
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_protos.v1.parameter_server_pb2_grpc import ParameterServerStub

from shoal_common.bulk.frames import Kind
from shoal_common.bulk.transport import Transport
from shoal_common.clients.bulk import BulkChannel
from shoal_common.clients.calls import Caller
from shoal_common.clients.pull import PullReceiver
from shoal_common.errors import CorruptDataError, ShoalError
from shoal_common.formats.wire import (
    decode_pull_chunk,
    decode_rows_chunk,
    encode_push_chunk,
    encode_rows_chunk,
    framed,
)
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.rpc.status import is_unreachable
from shoal_common.system.allocator import keep_freed_memory

SERVICE: Final = "shoal.v1.ParameterServer"
DEFAULT_STREAM_DEADLINE: Final = timedelta(seconds=60)

ResponseT = TypeVar("ResponseT")

Partitions = Iterable[tuple[pb.PushHeader, memoryview]]
"""Partitions to push, as pairs of header and encoded payload. The caller sets payload_bytes and
checksum in each header."""


class _Stub:
    """Methods of the service. Methods that transfer tensors use Shoal's own serialization instead
    of the generated code."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._generated = ParameterServerStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.initialize = channel.stream_unary(
            f"/{SERVICE}/Initialize",
            request_serializer=encode_push_chunk,
            response_deserializer=pb.PushResponse.FromString,
        )
        self.push = channel.stream_unary(
            f"/{SERVICE}/Push",
            request_serializer=encode_push_chunk,
            response_deserializer=pb.PushResponse.FromString,
        )
        self.restore_rows = channel.stream_unary(
            f"/{SERVICE}/RestoreRows",
            request_serializer=encode_rows_chunk,
            response_deserializer=pb.RestoreRowsResponse.FromString,
        )
        self.read_rows = channel.unary_stream(
            f"/{SERVICE}/ReadRows", request_serializer=pb.ReadRowsRequest.SerializeToString
        )
        # The reader decodes the chunks, so that it can identify a malformed one. If a deserializer
        # failed, gRPC would not report why.
        self.pull = channel.unary_stream(
            f"/{SERVICE}/Pull", request_serializer=pb.PullRequest.SerializeToString
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generated, name)


class ParameterServerClient:
    """Synchronous client of one parameter server. A context manager. The first call opens the
    connection.

    The first client in a process configures malloc to keep freed memory
    (shoal_common.system.allocator).
    """

    def __init__(
        self,
        settings: ChannelSettings,
        *,
        interceptors: Sequence[Any] = (),
        transport: Transport = Transport.AUTO,
        member_id: str = "",
        fell_back: Callable[[Transport], None] = lambda transport: None,
    ) -> None:
        """Prepares the client; the first call opens a connection.

        Args:
            settings: address of the server, and options for calling it.
            interceptors: interceptors of the calls, e.g. for metrics.
            transport: transport of tensors. With AUTO, an unavailable transport is skipped, logged
                once, and tried again after a minute. With any other value, only that transport is
                used; if it is unavailable, calls raise UnavailableError / TRANSPORT_UNAVAILABLE.
            member_id: member that makes most of the calls. Connections for other members are opened
                when they are needed.
            fell_back: called with each transport that fails unexpectedly.
        """
        keep_freed_memory()
        self._member_id = member_id
        self.address = settings.address
        """Address of the server."""
        self._lock = threading.Lock()
        self._calls: dict[object, float] = {}
        """Start of each call in progress, by the monotonic clock. Guarded by `_lock`."""
        self._closed = False
        self._caller = Caller(settings, interceptors, _Stub)
        self._bulk = BulkChannel(
            settings,
            lambda job_id, member_id, deadline: self.open_data(
                job_id, member_id, deadline=deadline
            ),
            transport=transport,
            fell_back=fell_back,
        )

    # ---------------------------------------------------------------------------- the client itself

    @property
    def is_closed(self) -> bool:
        """True if the client has been closed."""
        return self._closed

    @property
    def oldest_call_s(self) -> float:
        """Seconds since the start of the oldest call in progress; 0 if no call is in progress."""
        with self._lock:
            return time.monotonic() - min(self._calls.values()) if self._calls else 0.0

    def answers(self, deadline: timedelta) -> bool:
        """Returns whether the server responds to a health check within `deadline`, with any status.
        The health check does not count as a call in progress."""
        try:
            self._caller.stub.health.Check(
                health_pb2.HealthCheckRequest(), timeout=deadline.total_seconds()
            )
        except grpc.RpcError as error:
            return not (
                is_unreachable(error)
                or error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
            )
        except ValueError:  # the channel is closed
            return False
        return True

    @contextmanager
    def _in_progress(self) -> Iterator[None]:
        call = object()
        with self._lock:
            self._calls[call] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._calls[call]

    def _unary(
        self, method: str, request: Any, response: type[ResponseT], deadline: timedelta | None
    ) -> ResponseT:
        with self._in_progress():
            return self._caller.unary(method, request, response, deadline)

    # -------------------------------------------------------------------------------------- tensors

    def initialize(
        self, partitions: Partitions, *, deadline: timedelta = DEFAULT_STREAM_DEADLINE
    ) -> list[pb.PartitionResult]:
        """Sends the first values of partitions. If several callers send values for a partition, the
        first ones are kept. Returns one result per partition, in order."""
        with self._in_progress():
            return self._upload(Kind.INITIALIZE, self._caller.stub.initialize, partitions, deadline)

    def push(
        self, partitions: Partitions, *, deadline: timedelta = DEFAULT_STREAM_DEADLINE
    ) -> list[pb.PartitionResult]:
        """Pushes gradients. Returns one result per partition, in order.

        After an error, some partitions may have been applied. Push all of them again with the same
        sequence numbers: the server acknowledges partitions that it has already applied, but does
        not apply them twice. Buffers must not change until the call returns. `partitions` may be
        iterated over on another thread.
        """
        with self._in_progress():
            return self._upload(Kind.PUSH, self._caller.stub.push, partitions, deadline)

    def pull(
        self,
        request: pb.PullRequest,
        into: Callable[[pb.PullHeader], memoryview | None],
        *,
        deadline: timedelta | None = None,
    ) -> list[pb.PullHeader]:
        """Pulls partitions, and returns their headers in the order in which the server has sent
        them.

        After an error, buffers may contain incomplete partitions; pull all of them again.

        Args:
            request: partitions to pull.
            into: returns the buffer for the payload of a partition, given its header; None discards
                the payload. It is not called for `unchanged` partitions. Buffers must be writable,
                C-contiguous and exactly `payload_bytes` long.
            deadline: maximum duration; None: 60 s more than the request's wait_ms.

        Raises:
            CorruptDataError: a payload is truncated or damaged.
        """
        if deadline is None:
            deadline = DEFAULT_STREAM_DEADLINE + timedelta(milliseconds=request.wait_ms)
        receiver = PullReceiver(into)
        until = time.monotonic() + deadline.total_seconds()
        with self._in_progress():
            self._receive(request, receiver, until)
        return receiver.finish()

    def _receive(self, request: pb.PullRequest, receiver: PullReceiver, until: float) -> None:
        with self._bulk.connection(
            request.job_id, request.member_id or self._member_id, until
        ) as connection:
            if connection is not None:
                connection.pull(request, receiver, until)
                return
        with self._caller.errors("Pull"):
            call = self._caller.stub.pull(request, timeout=until - time.monotonic())
            try:
                for data in call:
                    receiver.receive(*decode_pull_chunk(data))
            finally:
                call.cancel()

    def read_rows(
        self,
        request: pb.ReadRowsRequest,
        write: Callable[[memoryview], object],
        *,
        deadline: timedelta = DEFAULT_STREAM_DEADLINE,
    ) -> pb.RowsHeader:
        """Reads one bucket of a sparse table as a file, and passes it to `write` piece by piece.
        Returns the header, whose size and checksum have been verified.

        Raises CorruptDataError (PAYLOAD_TRUNCATED, CHECKSUM_MISMATCH) if the file is damaged.
        """
        header: pb.RowsHeader | None = None
        digest, came = xxhash.xxh3_64(), 0
        with self._in_progress(), self._caller.errors("ReadRows"):
            call = self._caller.stub.read_rows(request, timeout=deadline.total_seconds())
            try:
                for data in call:
                    opening, piece = decode_rows_chunk(data, CorruptDataError)
                    header = opening if header is None else header
                    digest.update(piece)
                    came += piece.nbytes
                    write(piece)
            finally:
                call.cancel()
        if header is None or came != header.payload_bytes:
            raise CorruptDataError(
                f"a bucket was truncated after {came} bytes; read it again",
                reason="PAYLOAD_TRUNCATED",
            )
        if digest.intdigest() != header.checksum:
            raise CorruptDataError(
                "a bucket does not match its checksum; read it again", reason="CHECKSUM_MISMATCH"
            )
        return header

    def restore_rows(
        self,
        header: pb.RowsHeader,
        payload: Iterable[memoryview],
        *,
        deadline: timedelta = DEFAULT_STREAM_DEADLINE,
    ) -> pb.RestoreRowsResponse:
        """Replaces the contents of a bucket of a sparse table with the contents of a file.
        `payload`: bytes of the file, in pieces of at most 4 MiB."""
        outgoing = chain([(header, memoryview(b""))], ((None, piece) for piece in payload))
        with self._in_progress(), self._caller.errors("RestoreRows"):
            answer: pb.RestoreRowsResponse = self._caller.stub.restore_rows(
                outgoing, timeout=deadline.total_seconds()
            )
            return answer

    def _upload(
        self,
        kind: Kind,
        multi_callable: Callable[..., pb.PushResponse],
        partitions: Partitions,
        deadline: timedelta,
    ) -> list[pb.PartitionResult]:
        until = time.monotonic() + deadline.total_seconds()
        coming = iter(partitions)
        if (
            first := next(coming, None)
        ) is not None:  # the first header contains the job and the member of the upload
            coming = chain((first,), coming)
            with self._bulk.connection(first[0].job_id, first[0].member_id, until) as connection:
                if connection is not None:
                    return connection.upload(kind, coming, until)
        outgoing = _Outgoing(coming)
        try:
            with self._caller.errors(kind.name.title()):
                return list(
                    multi_callable(iter(outgoing), timeout=until - time.monotonic()).results
                )
        except ShoalError as error:
            if outgoing.failure is not None:
                raise outgoing.failure from error
            raise

    # ---------------------------------------------------------------------------------- other calls

    def configure_optimizer(
        self,
        job_id: str,
        optimizer: pb.OptimizerSpec,
        consistency: pb.Consistency,
        *,
        deadline: timedelta | None = None,
    ) -> pb.ConfigureOptimizerResponse:
        request = pb.ConfigureOptimizerRequest(
            job_id=job_id, optimizer=optimizer, consistency=consistency
        )
        return self._unary("ConfigureOptimizer", request, pb.ConfigureOptimizerResponse, deadline)

    def set_hyperparameters(
        self,
        job_id: str,
        *,
        revision: int,
        hyperparameters: Mapping[str, float],
        groups: Iterable[pb.ParameterGroup] = (),
        deadline: timedelta | None = None,
    ) -> pb.SetHyperparametersResponse:
        request = pb.SetHyperparametersRequest(
            job_id=job_id, revision=revision, hyperparameters=hyperparameters, groups=groups
        )
        return self._unary("SetHyperparameters", request, pb.SetHyperparametersResponse, deadline)

    def open_data(
        self, job_id: str, member_id: str = "", *, deadline: timedelta | None = None
    ) -> pb.OpenDataResponse:
        """Requests a ticket for the bulk channel. `push`, `initialize` and `pull` do this
        automatically."""
        request = pb.OpenDataRequest(job_id=job_id, member_id=member_id)
        return self._unary("OpenData", request, pb.OpenDataResponse, deadline)

    def advance_clock(
        self,
        job_id: str,
        member_id: str,
        *,
        clock: int,
        has_read: bool = False,
        place: int = 0,
        generation: int = 0,
        shard_map_epoch: int = 0,
        deadline: timedelta | None = None,
    ) -> pb.AdvanceClockResponse:
        """Reports that the member has finished iteration `clock` or, with `has_read`, that it has
        read the values at the end of that iteration (bsp).

        `place`, `generation`, `shard_map_epoch`: as in AdvanceClockRequest.
        """
        request = pb.AdvanceClockRequest(
            job_id=job_id,
            member_id=member_id,
            clock=clock,
            has_read=has_read,
            place=place,
            generation=generation,
            shard_map_epoch=shard_map_epoch,
        )
        return self._unary("AdvanceClock", request, pb.AdvanceClockResponse, deadline)

    def snapshot(
        self, job_id: str, *, deadline: timedelta = DEFAULT_STREAM_DEADLINE
    ) -> pb.SnapshotResponse:
        return self._unary(
            "Snapshot", pb.SnapshotRequest(job_id=job_id), pb.SnapshotResponse, deadline
        )

    def get_server(
        self, *, member_id: str = "", deadline: timedelta | None = None
    ) -> pb.GetServerResponse:
        """Returns the server's state. With `member_id`, the state of each partition contains that
        member's last sequence number."""
        return self._unary(
            "GetServer", pb.GetServerRequest(member_id=member_id), pb.GetServerResponse, deadline
        )

    def close(self) -> None:
        """Cancels calls in progress and closes the connection. Idempotent."""
        self._closed = True
        self._caller.close()
        self._bulk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Outgoing:
    """Iterator over the chunks of an upload. Records in `failure` an error raised while the chunks
    are produced, because gRPC does not report such an error."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[tuple[pb.PushHeader | None, memoryview]]:
        try:
            for header, payload in self._partitions:
                yield from framed(header, payload)
        except Exception as error:
            self.failure = error
            raise
