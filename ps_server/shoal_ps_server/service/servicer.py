"""RPCs of shoal.v1.ParameterServer. Each method parses its request, calls the server's components,
and composes the response.

Handlers run on the event loop and raise ShoalErrors, which RpcServer converts to gRPC statuses.
Uploads and pulls are exchanged as raw messages, so that protobuf does not copy their payloads
(shoal_common.formats.wire).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from shoal_common.bulk.transport import Transport
from shoal_common.errors import (
    PermissionDeniedError,
    PreconditionError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_common.failpoints import failpoint
from shoal_common.formats.wire import CHUNK_BYTES, encode_pull_chunk
from shoal_common.optimizers.for_servers import Unit
from shoal_common.rpc.server_interceptor import caller, member_key
from shoal_common.security.authentication import ANY_ROLE, Role
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_ps_server.configuration import Configuration
from shoal_ps_server.consistency.clocks import Consistency, ConsistencyMode
from shoal_ps_server.consistency.membership import Membership
from shoal_ps_server.metrics import Metrics
from shoal_ps_server.replication.primary import Backup
from shoal_ps_server.replication.transfer_sink import TransferSink
from shoal_ps_server.service.bulk.server import BulkServer
from shoal_ps_server.service.bulk.tickets import Speaker, Tickets
from shoal_ps_server.service.layouts import Layouts
from shoal_ps_server.service.requests import (
    MODES,
    HyperparameterChange,
    UploadKind,
    at_least,
    check_job,
    parse_begin,
    parse_consistency,
    parse_hyperparameter_change,
    parse_member,
    parse_optimizer,
)
from shoal_ps_server.service.streams import parts_of
from shoal_ps_server.service.transfers import Transfers
from shoal_ps_server.service.whole_buckets import WholeBuckets
from shoal_ps_server.session import incarnation
from shoal_ps_server.shard.optimizer import OptimizerSettings
from shoal_ps_server.shard.reading import Reading
from shoal_ps_server.shard.shard import MOVING_RETRY, Shard
from shoal_ps_server.storage.changes import Changes
from shoal_ps_server.storage.snapshot_keeper import SnapshotKeeper

SERVICE: Final = "shoal.v1.ParameterServer"

_NOTHING: Final = memoryview(b"")
_WORKERS: Final = frozenset({Role.WORKER})

ALLOWED_ROLES: Final[Mapping[str, frozenset[Role]]] = {
    f"/{SERVICE}/ConfigureOptimizer": _WORKERS,
    f"/{SERVICE}/SetHyperparameters": _WORKERS,
    f"/{SERVICE}/Initialize": _WORKERS,
    f"/{SERVICE}/Push": _WORKERS,
    f"/{SERVICE}/Pull": _WORKERS | {Role.READER},  # readers are not members of the job
    f"/{SERVICE}/ReadRows": _WORKERS | {Role.READER},
    f"/{SERVICE}/RestoreRows": _WORKERS,
    f"/{SERVICE}/OpenData": _WORKERS | {Role.READER},
    f"/{SERVICE}/AdvanceClock": _WORKERS,
    f"/{SERVICE}/Snapshot": _WORKERS,
    f"/{SERVICE}/Follow": frozenset({Role.SERVER}),
    f"/{SERVICE}/TakePartitions": frozenset({Role.SERVER}),
    f"/{SERVICE}/GetServer": ANY_ROLE,
}
"""Full method name -> roles that may call the method, in addition to ADMIN, which may call all
methods."""

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Ids of the server and of its job."""

    job_id: str
    server_id: str


class ParameterServerServicer:
    """Implements the RPCs of one server. It owns the configuration; all other state belongs to the
    components passed to it."""

    def __init__(
        self,
        *,
        identity: Identity,
        shard: Shard,
        membership: Membership,
        layouts: Layouts,
        transfers: Transfers,
        tickets: Tickets,
        bulk: BulkServer,
        whole_buckets: WholeBuckets,
        snapshots: SnapshotKeeper,
        receiver: Callable[[Callable[[Configuration], Awaitable[Configuration]]], TransferSink],
        changes: Changes,
        backup: Backup,
        with_backups: Callable[[], bool],
        check_place: Callable[[], Awaitable[None]],
        metrics: Metrics,
        configuration: Configuration | None,
    ) -> None:
        """`receiver`: creates the TransferSink, given the function that reconciles this server's
        configuration with the configuration of another server. `check_place`: raises
        UnavailableError unless it is known that this server, and not its backup or a replacement,
        must serve requests."""
        self.configuration = configuration
        self._receiver = receiver(self.agree)
        self._backup = backup
        self._with_backups = with_backups
        self._check_place = check_place
        self._identity = identity
        self._shard = shard
        self._membership = membership
        self._layouts = layouts
        self._transfers = transfers
        self._tickets = tickets
        self._bulk = bulk
        self._whole_buckets = whole_buckets
        self._snapshots = snapshots
        self._changes = changes
        self._configuring = asyncio.Lock()
        """Lock held from reading the configuration until a change based on it is complete."""
        self._tasks: set[asyncio.Task[bool]] = set()
        """Pending changes to the configuration."""
        self._metrics = metrics
        if configuration is not None:
            membership.consistency = configuration.consistency

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a gRPC server."""
        handlers: dict[str, grpc.RpcMethodHandler] = {
            "Initialize": grpc.stream_unary_rpc_method_handler(
                self.initialize, response_serializer=pb.PushResponse.SerializeToString
            ),
            "Push": grpc.stream_unary_rpc_method_handler(
                self.push, response_serializer=pb.PushResponse.SerializeToString
            ),
            "Pull": grpc.unary_stream_rpc_method_handler(
                self.pull, request_deserializer=pb.PullRequest.FromString
            ),
            "ReadRows": grpc.unary_stream_rpc_method_handler(
                self.read_rows, request_deserializer=pb.ReadRowsRequest.FromString
            ),
            "RestoreRows": grpc.stream_unary_rpc_method_handler(
                self.restore_rows, response_serializer=pb.RestoreRowsResponse.SerializeToString
            ),
            "Follow": grpc.stream_stream_rpc_method_handler(
                self.follow, request_deserializer=pb.FollowRequest.FromString
            ),
            "TakePartitions": grpc.stream_unary_rpc_method_handler(
                self.take_partitions,
                response_serializer=pb.TakePartitionsResponse.SerializeToString,
            ),
        }
        unary: tuple[tuple[Callable[[Any, Any], Awaitable[Any]], Any, Any], ...] = (
            (self.configure_optimizer, pb.ConfigureOptimizerRequest, pb.ConfigureOptimizerResponse),
            (self.set_hyperparameters, pb.SetHyperparametersRequest, pb.SetHyperparametersResponse),
            (self.open_data, pb.OpenDataRequest, pb.OpenDataResponse),
            (self.advance_clock, pb.AdvanceClockRequest, pb.AdvanceClockResponse),
            (self.snapshot, pb.SnapshotRequest, pb.SnapshotResponse),
            (self.get_server, pb.GetServerRequest, pb.GetServerResponse),
        )
        for behaviour, request, response in unary:
            name = request.DESCRIPTOR.name.removesuffix("Request")
            handlers[name] = grpc.unary_unary_rpc_method_handler(
                behaviour,
                request_deserializer=request.FromString,
                response_serializer=response.SerializeToString,
            )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    # -------------------------------------------------------------------------------------- tensors

    async def initialize(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> pb.PushResponse:
        """Implements the Initialize RPC: stores the first values of partitions."""
        return await self._transfers.upload(
            parts_of(messages), UploadKind.INITIALIZE, Transport.GRPC, key=member_key()
        )

    async def push(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> pb.PushResponse:
        """Implements the Push RPC: applies gradients to partitions."""
        return await self._transfers.upload(
            parts_of(messages), UploadKind.PUSH, Transport.GRPC, key=member_key()
        )

    async def pull(
        self, request: pb.PullRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Implements the Pull RPC: streams the values of partitions."""
        with self._metrics.counting_refusals("Pull"):
            self._check_reader(request.member_id)
        async with aclosing(
            self._transfers.pull(request, Transport.GRPC, key=member_key())
        ) as answers:
            async for header, reading in answers:
                for chunk in _pull_chunks(header, reading):
                    yield chunk

    async def read_rows(
        self, request: pb.ReadRowsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Implements the ReadRows RPC: streams a complete bucket of a sparse table."""
        with self._metrics.counting_refusals("ReadRows"):
            check_job(request.job_id, self._identity.job_id)
            await self._check_place()
            async with aclosing(self._whole_buckets.read(request)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def restore_rows(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> pb.RestoreRowsResponse:
        """Implements the RestoreRows RPC: replaces a bucket of a sparse table."""
        with self._metrics.counting_refusals("RestoreRows"):
            await self._check_place()
            return await self._whole_buckets.restore(messages, key=member_key())

    async def open_data(
        self, request: pb.OpenDataRequest, context: grpc.aio.ServicerContext
    ) -> pb.OpenDataResponse:
        """Implements the OpenData RPC: issues a ticket for the bulk channel."""
        with self._metrics.counting_refusals("OpenData"):
            check_job(request.job_id, self._identity.job_id)
            member_id = parse_member(request.member_id) if request.member_id else ""
            self._check_reader(member_id)
            speaker = Speaker(member_id=member_id, key=member_key())
            if member_id:
                self._membership.check_key(member_id, speaker.key)
            ticket = self._tickets.issue(speaker, asyncio.get_running_loop().time())
            return pb.OpenDataResponse(
                ticket=ticket, tcp_port=self._bulk.port, memory_name=self._bulk.memory_name
            )

    async def follow(
        self, requests: AsyncIterator[pb.FollowRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Implements the Follow RPC: sends this server's state and all further changes to its
        backup."""
        with self._metrics.counting_refusals("Follow"):
            begin = await parse_begin(requests)
            check_job(begin.job_id, self._identity.job_id)
            await self._check_place()
            async with aclosing(self._backup.serve(begin, requests)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def take_partitions(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> pb.TakePartitionsResponse:
        """Implements the TakePartitions RPC: receives partitions that another server hands over."""
        with self._metrics.counting_refusals("TakePartitions"):
            await self._check_place()
            await self._receiver.take(messages)
            return pb.TakePartitionsResponse(incarnation=incarnation())

    # ---------------------------------------------------------------------------------- other calls

    async def configure_optimizer(
        self, request: pb.ConfigureOptimizerRequest, context: Any
    ) -> pb.ConfigureOptimizerResponse:
        """Implements the ConfigureOptimizer RPC: sets the job's optimizer and consistency model."""
        with self._metrics.counting_refusals("ConfigureOptimizer"):
            check_job(request.job_id, self._identity.job_id)
            await self._check_place()
            tensors = (await self._layouts.any()).tensors if request.optimizer.groups else None
            optimizer = parse_optimizer(request.optimizer, tensors)
            if optimizer.unit is Unit.ROW:
                optimizer.check_pieces((await self._layouts.any()).partitions.values())
            consistency = parse_consistency(request.consistency)
            if optimizer.delay_compensation and self._with_backups():
                raise PreconditionError(
                    f"delay_compensation={optimizer.delay_compensation}: a backup does not store "
                    "the values that each member pulled; create the job without "
                    "parameter_server_backups, or omit delay_compensation",
                    reason="OPTIMIZER_INVALID",
                )
            return pb.ConfigureOptimizerResponse(
                configured=await self._to_its_end(self._first_configuration(optimizer, consistency))
            )

    async def set_hyperparameters(
        self, request: pb.SetHyperparametersRequest, context: Any
    ) -> pb.SetHyperparametersResponse:
        """Implements the SetHyperparameters RPC: applies a step of a hyperparameter schedule."""
        with self._metrics.counting_refusals("SetHyperparameters"):
            check_job(request.job_id, self._identity.job_id)
            await self._check_place()
            change = parse_hyperparameter_change(request)
            return pb.SetHyperparametersResponse(
                applied=await self._to_its_end(self._revision(change))
            )

    async def advance_clock(
        self, request: pb.AdvanceClockRequest, context: Any
    ) -> pb.AdvanceClockResponse:
        """Implements the AdvanceClock RPC: records that a member has finished an iteration, or has
        read the values at its end."""
        with self._metrics.counting_refusals("AdvanceClock"):
            check_job(request.job_id, self._identity.job_id)
            await self._check_place()
            member_id, clock = parse_member(request.member_id), at_least("clock", request.clock, 0)
            place, generation = (
                at_least("place", request.place, 0),
                at_least("generation", request.generation, 0),
            )
            if request.shard_map_epoch:
                await self._layouts.of_epoch(request.shard_map_epoch)
            if generation:
                await self._membership.admit(member_id, generation, key=member_key())
            elif member_id not in self._membership.fence.members:
                raise UnknownResourceError(
                    f"member {member_id!r} is not in generation "
                    f"{self._membership.fence.generation}, the newest known to this server; "
                    "join again, or exit",
                    reason="MEMBER_UNKNOWN",
                )
            else:
                self._membership.check_key(member_id, member_key())
            # During the wait, partitions may have begun to move or have moved. There are no further
            # waits after this check.
            if request.shard_map_epoch:
                await self._layouts.of_epoch(request.shard_map_epoch)
            self._check_clocks_stay()
            if request.has_read:
                self._membership.has_read(member_id, clock)
            else:
                self._membership.finished(member_id, clock, place=place)
                if self._membership.consistency.mode is not ConsistencyMode.ASP:
                    self._changes.clock(member_id, clock, place=place)
            return pb.AdvanceClockResponse(slowest_clock=self._membership.clocks.slowest)

    async def snapshot(self, request: pb.SnapshotRequest, context: Any) -> pb.SnapshotResponse:
        """Implements the Snapshot RPC: writes a snapshot to disk."""
        with self._metrics.counting_refusals("Snapshot"):
            check_job(request.job_id, self._identity.job_id)
            written = await self._snapshots.write()
            return pb.SnapshotResponse(path=str(written.path), bytes=written.nbytes)

    async def get_server(self, request: pb.GetServerRequest, context: Any) -> pb.GetServerResponse:
        """Implements the GetServer RPC: returns the state of this server and its partitions."""
        if (
            request.member_id
        ):  # a worker sent the request, and will continue from the state in the response
            await self._check_place()
        summary = self._shard.summary(request.member_id)
        layout, configuration, clocks = (
            self._layouts.current,
            self.configuration,
            self._membership.clocks.members,
        )
        return pb.GetServerResponse(
            server_id=self._identity.server_id,
            job_id=self._identity.job_id,
            server_index=-1 if layout is None else layout.server_index,
            stored_bytes=summary.stored_bytes,
            shard_map_epoch=0 if layout is None else layout.epoch,
            pushes_applied=summary.pushes_applied,
            pushes_deduplicated=summary.pushes_deduplicated,
            optimizer=None
            if configuration is None
            else _optimizer_message(configuration.optimizer),
            consistency=None
            if configuration is None
            else _consistency_message(configuration.consistency),
            partitions=[
                pb.PartitionVersion(
                    partition_id=number,
                    version=version,
                    sequence=summary.sequences.get(number, 0),
                    moving=number in self._shard.frozen,
                    restoration=summary.restorations.get(number, 0),
                )
                for number, version in summary.versions.items()
            ],
            clocks={member: each.clock for member, each in clocks.items()},
            iterations={
                m: each.clock - each.origin
                for m, each in clocks.items()
                if each.origin is not None and each.takes_part
            },
        )

    def _check_clocks_stay(self) -> None:
        """Raises UnavailableError while partitions of this server are being moved, except under
        asp. The receiver of the partitions already has a copy of the clocks. A report that arrived
        here now would therefore be lost once the receiver owns the partitions."""
        if self._shard.frozen and self._membership.consistency.mode is not ConsistencyMode.ASP:
            raise UnavailableError(
                "partitions of this server are moving to another one, which already has a copy "
                "of the workers' clocks; fetch the shard map again from the coordinator, and "
                "repeat this call",
                reason="PARTITION_MOVING",
                retry_after=MOVING_RETRY,
            )

    def _check_reader(self, member_id: str) -> None:
        """Raises PermissionDeniedError if a caller with the reader role claims to be a member,
        because other members would wait for it."""
        if member_id and caller().role is Role.READER:
            raise PermissionDeniedError(
                f"member_id={member_id!r}: expected an empty member_id, since this token has the "
                "role reader"
            )

    async def _first_configuration(
        self, optimizer: OptimizerSettings, consistency: Consistency
    ) -> bool:
        async with self._configuring:
            if self.configuration is not None:
                self.configuration.check_equal(optimizer, consistency)
                return False
            await self._configure(
                Configuration(configured=optimizer, optimizer=optimizer, consistency=consistency)
            )
            return True

    async def _revision(self, change: HyperparameterChange) -> bool:
        async with self._configuring:
            if self.configuration is None:
                raise PreconditionError(
                    "this server has no optimizer yet; send ConfigureOptimizer",
                    reason="OPTIMIZER_UNCONFIGURED",
                )
            revised = self.configuration.revised(
                change.revision, change.hyperparameters, change.groups
            )
            if revised is self.configuration:
                return False
            await self._configure(revised)
            return True

    async def agree(self, given: Configuration) -> Configuration:
        """Adopts another server's configuration if it has a newer revision than this server's
        configuration. Returns the resulting configuration. Raises PreconditionError /
        OPTIMIZER_CONFLICT."""
        await self._to_its_end(self._agreement(given))
        assert self.configuration is not None, "it was agreed on"
        return self.configuration

    async def _agreement(self, given: Configuration) -> bool:
        async with self._configuring:
            own = self.configuration
            if own is not None:
                own.check_equal(given.configured, given.consistency)
            if newer := own is None or given.revision > own.revision:
                await self._configure(given)
            return newer

    async def _configure(self, configuration: Configuration) -> None:
        """Changes the configuration at one point in the order of the journal: pushes before this
        point use the old configuration, and pushes after it the new one."""

        def effect() -> None:
            self.configuration = configuration
            self._membership.consistency = configuration.consistency
            self._shard.configure(configuration.optimizer)

        await self._changes.configure(configuration, effect)

    async def _to_its_end(self, change: Coroutine[Any, Any, bool]) -> bool:
        """Completes a change even if its caller disconnects, because the next change depends on
        this one."""
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)


def _pull_chunks(header: pb.PullHeader, reading: Reading | None) -> Iterator[bytes]:
    """Yields one partition of a pull as PullChunks. Each chunk is copied when it is requested,
    before any other task can change the values."""
    if reading is None:
        yield encode_pull_chunk((header, _NOTHING))
        return
    opening: pb.PullHeader | None = header
    while opening is not None or reading.remaining:
        yield encode_pull_chunk((opening, reading.take(CHUNK_BYTES)))
        opening = None
        failpoint("pull.halfway")


def _optimizer_message(optimizer: OptimizerSettings) -> pb.OptimizerSpec:
    return pb.OptimizerSpec(
        name=optimizer.name,
        hyperparameters=dict(optimizer.hyperparameters),
        groups=[
            pb.ParameterGroup(
                tensors=sorted(group.tensors), hyperparameters=dict(group.hyperparameters)
            )
            for group in optimizer.groups
        ],
        delay_compensation=optimizer.delay_compensation,
    )


def _consistency_message(consistency: Consistency) -> pb.Consistency:
    wire = next(wire for wire, mode in MODES.items() if mode is consistency.mode)
    return pb.Consistency(mode=pb.Consistency.Mode.ValueType(wire), bound=consistency.bound)
