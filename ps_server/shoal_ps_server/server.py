"""Assembles one parameter server: defines which thread owns which state, and the order of startup
and shutdown. Belongs to the event loop.

    event loop           all mutable state: partitions, membership (fence, clocks), layouts,
                         configuration, metrics; bulk connections (service/bulk)
    gRPC's threads       sockets and HTTP/2 framing
    HTTP threads         /metrics and /healthz
    one thread           TLS handshakes of bulk connections
    the journal's thread writes changes to disk, and syncs them, before they are applied
    a pool thread        writes a snapshot after its contents were copied
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from shoal_common.errors import ConfigurationError, InternalError, UnavailableError
from shoal_common.failpoints import failpoint
from shoal_common.formats.runs import Run
from shoal_common.rpc.server import RpcServer, ServerSettings
from shoal_common.tasks import end_tasks
from shoal_common.telemetry import HttpServer, serve_metrics
from shoal_common.telemetry.loop_watch import LoopWatch

from shoal_ps_server.configuration import Configuration
from shoal_ps_server.consistency.clocks import ConsistencyMode
from shoal_ps_server.consistency.membership import Membership
from shoal_ps_server.metrics import Metrics
from shoal_ps_server.replication.primary import Backup
from shoal_ps_server.replication.transfer_sink import TransferSink
from shoal_ps_server.replication.transfer_source import TransferSource
from shoal_ps_server.service.bulk.descriptors import BulkShare
from shoal_ps_server.service.bulk.server import BulkServer
from shoal_ps_server.service.bulk.tickets import Tickets
from shoal_ps_server.service.intake import Intake
from shoal_ps_server.service.layouts import Layouts
from shoal_ps_server.service.mover import Mover
from shoal_ps_server.service.primary_place import PrimaryPlace
from shoal_ps_server.service.pulls import Pulls
from shoal_ps_server.service.requests import UploadKind
from shoal_ps_server.service.servicer import (
    ALLOWED_ROLES,
    SERVICE,
    Identity,
    ParameterServerServicer,
)
from shoal_ps_server.service.staging import Staging
from shoal_ps_server.service.transfers import Transfers
from shoal_ps_server.service.whole_buckets import WholeBuckets
from shoal_ps_server.session import (
    CoordinatorSession,
    Known,
    MoveOrder,
    Place,
    Registration,
    this_process,
)
from shoal_ps_server.settings import PsServerSettings
from shoal_ps_server.shard.layout import Layout
from shoal_ps_server.shard.payload import Upload
from shoal_ps_server.shard.shard import Outcome
from shoal_ps_server.storage.changes import Changes
from shoal_ps_server.storage.directory import DataDirectory
from shoal_ps_server.storage.image import Members, ServerState
from shoal_ps_server.storage.journal import Journal
from shoal_ps_server.storage.recovery import Recovered
from shoal_ps_server.storage.snapshot_keeper import SnapshotKeeper

logger = logging.getLogger(__name__)


class ParameterServer:
    """A server in the role of a primary. Must be created on an event loop; then call `run`."""

    def __init__(
        self, settings: PsServerSettings, directory: DataDirectory | None, recovered: Recovered
    ) -> None:
        """`recovered`: state of the server, restored from `directory` if it is not None."""
        self._settings = settings
        self._identity = Identity(job_id=settings.job, server_id=settings.server_id)
        self._directory = directory
        self._recovered = recovered
        self._registry = CollectorRegistry()
        self._metrics = Metrics(self._registry)
        if directory is not None:
            self._metrics.watch_disk(directory.path)
        self._shard = recovered.shard
        self._moves = recovered.moves
        self._membership = Membership(
            fence=recovered.members.fence(),
            clocks=recovered.members.restored_clocks(),
            first_heard=self._first_heard,
        )
        self._layouts = Layouts(
            current=recovered.layout, fetch=self._fetch_layout, adopt=self._adopt_layout
        )
        self._backup = Backup(
            shard=self._shard,
            moves=self._moves,
            state=self._state,
            report=self._report_backup,
            metrics=self._metrics,
            noted=recovered.backup,
        )
        self._primary_place = PrimaryPlace(
            job_id=settings.job,
            recovered=recovered,
            has_journal=directory is not None,
            layouts=self._layouts,
            backup=self._backup,
        )
        self._changes = Changes(
            shard=self._shard, layout=lambda: self._layouts.current, members=self._members
        )
        self._pulls = Pulls(
            shard=self._shard,
            membership=self._membership,
            quiet=lambda: self._changes.in_time(self._changes.quiet),
            waited=self._metrics.turn_wait_seconds.labels("Pull").observe,
            answered=self._answered,
        )
        self._snapshots = SnapshotKeeper(
            directory=directory,
            shard=self._shard,
            moves=self._moves,
            state=self._state,
            changes=self._changes,
            metrics=self._metrics,
            journal_limit=settings.journal_limit,
        )
        transfers = Transfers(
            job_id=settings.job,
            check_place=self._primary_place.check,
            layouts=self._layouts,
            intake=Intake(
                job_id=settings.job,
                changes=self._changes,
                membership=self._membership,
                layout_of_epoch=self._layouts.of_epoch,
                applied=self._applied,
                waited=self._metrics.turn_wait_seconds.labels("Push").observe,
                staging=Staging(nbytes=settings.staging_memory),
            ),
            pulls=self._pulls,
            metrics=self._metrics,
        )
        self._giver = TransferSource(
            shard=self._shard,
            moves=self._moves,
            changes=self._changes,
            state=self._state,
            wake=self._membership.wake,
            channel=settings.channel,
            metrics=self._metrics,
        )
        self._mover = Mover(
            moves=self._moves,
            giver=self._giver,
            layouts=self._layouts,
            changes=self._changes,
            report=self._report_move,
        )
        share = BulkShare.of_this_process()
        tickets = Tickets(most_together=share.connections)
        self._bulk = BulkServer(
            tickets=tickets,
            transfers=transfers,
            metrics=self._metrics,
            tls=settings.serving_tls,
            most_strangers=share.strangers,
        )
        self._servicer = ParameterServerServicer(
            identity=self._identity,
            shard=self._shard,
            membership=self._membership,
            layouts=self._layouts,
            transfers=transfers,
            tickets=tickets,
            bulk=self._bulk,
            whole_buckets=WholeBuckets(
                job_id=settings.job,
                shard=self._shard,
                changes=self._changes,
                membership=self._membership,
                layout_of_epoch=self._layouts.of_epoch,
            ),
            snapshots=self._snapshots,
            receiver=self._receiver,
            changes=self._changes,
            backup=self._backup,
            with_backups=lambda: self._primary_place.with_backups,
            check_place=self._primary_place.check,
            metrics=self._metrics,
            configuration=recovered.configuration,
        )
        self._session: CoordinatorSession | None = None
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that receives an exception if the state in memory lacks changes that are in the
        journal."""

    async def run(self, stop: asyncio.Event) -> bool:
        """Serves until `stop` is set or the job has ended, then drains. Writes a last snapshot
        unless a backup has the complete state of this server. Returns True if the coordinator has
        made this server a backup: its state is then obsolete.

        Raises:
            ConfigurationError: the settings of addresses, TLS or tokens cannot be used.
            AnotherRunError: the run that this server's state belongs to has ended or is lost.
            UnavailableError: SNAPSHOT_FAILED or JOURNAL_FAILED if the last snapshot or the journal
                could not be written.
            InternalError: a change in the journal could not be applied.
            ShoalError: the coordinator refused this server's registration.
        """
        async with AsyncExitStack() as stack:
            watch = LoopWatch(f"parameter server {self._settings.server_id}", self._registry)
            stack.callback(watch.close)
            rpc = RpcServer(
                self._server_settings(),
                service_name=SERVICE,
                register=self._servicer.register,
                allowed_roles=ALLOWED_ROLES,
                metrics_registry=self._registry,
                job=self._settings.job,
            )
            http = stack.enter_context(
                serve_metrics(
                    str(self._settings.http),
                    self._registry,
                    unhealthy=self._unhealthy,
                    tokens=self._settings.token_table,
                    job=self._settings.job,
                )
            )
            self._open_journal()
            stack.push_async_callback(self._changes.close)
            self._bulk.start(self._settings.listen.host, self._settings.bulk_port)
            # if the RPC server cannot start
            stack.push_async_callback(self._bulk.drain_and_stop, timedelta(0))
            grpc_port = await rpc.start()
            stack.push_async_callback(self._last_snapshot)
            stack.push_async_callback(self._drain, rpc)
            stack.callback(self._membership.stop)
            stack.callback(self._pulls.stop)
            stack.callback(self._backup.stop)
            coordinator = self._settings.channel(str(self._settings.coordinator))
            self._session = CoordinatorSession(
                coordinator, self._registration(grpc_port, http), self
            )
            stack.push_async_callback(self._session.close)
            self._write_port_file(grpc_port, http)
            await self._until_over(stop, self._session)
            if self._primary_place.replaced.is_set():
                self._changes.give_up(
                    UnavailableError(
                        "another server took this server's place", reason="PLACE_UNKNOWN"
                    )
                )
        return self._primary_place.replaced.is_set()

    def _unhealthy(self) -> str | None:
        """Returns the reason why the server is unhealthy; None if it is healthy. Called on threads
        of the HTTP server."""
        error = self._changes.write_error
        return (
            None if error is None else f"cannot write the journal, so updates are refused: {error}"
        )

    def _open_journal(self) -> None:
        if self._directory is None:
            return
        try:
            journal = Journal(
                self._directory.segments,
                number=self._recovered.next_file,
                previous_end=self._recovered.last_end,
                fsync=self._settings.fsync,
                failed=self._not_made,
                written=self._metrics.journal_written,
                unwritten=self._metrics.journal_failures.inc,
            )
        except OSError as error:
            raise UnavailableError(
                f"data_dir={self._directory.path}: {error}; free some space on its disk",
                reason="JOURNAL_FAILED",
            ) from error
        self._changes.write_to(journal)
        self._backup.write_to(journal)

    async def _drain(self, rpc: RpcServer) -> None:
        """Drains and stops all tensor transfers and all RPCs."""
        await asyncio.gather(
            self._bulk.drain_and_stop(self._settings.drain_timeout), rpc.drain_and_stop()
        )

    async def _last_snapshot(self) -> None:
        if self._broken.done():
            # a snapshot would lack the change, and would delete the journal that contains it
            self._broken.result()
        if self._primary_place.replaced.is_set() or self._changes.is_broken:
            # another server has this state, or the journal contains more than a snapshot would
            await self._snapshots.idle()
        else:
            await self._snapshots.write_if_changed()

    def _not_made(self, error: BaseException) -> None:
        """Stops this process because a change that is in the journal could not be applied. The next
        process applies the change when it recovers."""
        logger.critical(
            "could not apply a change from the journal; exiting, so that recovery can apply it",
            extra={"error": error},
        )
        if not self._broken.done():
            self._broken.set_exception(
                InternalError(f"could not apply a change from the journal: {error}")
            )

    # ------------------------------------------------------------------- the coordinator's listener

    def known(self) -> Known:
        """Returns information about the job that the coordinator may have lost."""
        return Known(
            generation=max(0, self._membership.fence.generation),
            server_index=self._primary_place.held_index,
        )

    def welcomed(self, server_index: int, *, with_backups: bool, run: Run | None) -> None:
        """Records the index of the place that the coordinator has assigned, and the run of the
        session that was opened."""
        self._primary_place.welcomed(server_index, with_backups=with_backups)
        if run is not None and self._directory is not None:
            self._directory.note_run(run)
        self._metrics.coordinator_connected.set(1)
        logger.info("registered with the coordinator", extra={"server_index": server_index})

    def disconnected(self) -> None:
        """Records that the session has broken. Training continues."""
        self._metrics.coordinator_connected.set(0)

    def members(
        self, generation: int, member_ids: tuple[str, ...], key_digests: Mapping[str, str]
    ) -> None:
        """Adopts the members of a generation. Raises ConfigurationError if the generation is older
        than the newest one known to this server, because the job has then been created again."""
        held = self._membership.fence.generation
        if generation < held:
            # A job's generations never decrease, so this server would refuse all its workers
            # forever.
            raise ConfigurationError(
                f"job {self._settings.job!r} is at generation {generation} on the coordinator, but "
                f"this server holds values of generation {held}, so the job was created again; "
                "start this server with an empty data directory, or use another job name"
            )
        change = self._membership.learn(generation, member_ids, key_digests)
        self._changes.members_changed()
        self._shard.forget(change.forgotten)
        self._shard.keep_bases_of(self._membership.fence.members)
        self._metrics.generation.set(generation)
        self._metrics.members.set(len(member_ids))
        logger.info(
            "members",
            extra={
                "generation": generation,
                "joined": len(change.joined),
                "left": len(change.left),
            },
        )

    def placed(self, place: Place) -> None:
        """Adopts the place (index, role and backup) that the coordinator has assigned."""
        self._primary_place.placed(place)

    def settled(self, move: int, epoch: int) -> None:
        """Records that the coordinator has decided the outcome of all moves of partitions up to
        `move`."""
        self._mover.settled(move, epoch)

    def ordered(self, order: MoveOrder) -> None:
        """Records an order to give away partitions to another server."""
        self._mover.ordered(order)

    def stored_bytes(self) -> int:
        """Returns the number of stored bytes, for heartbeats. Also updates the gauges, so that they
        are as recent as heartbeats."""
        summary = self._shard.summary()
        clocks = [each.clock for each in self._membership.clocks.members.values()]
        metrics = self._metrics
        metrics.stored_bytes.set(summary.stored_bytes)
        metrics.table_rows.set(summary.stored_rows)
        metrics.partitions.set(len(summary.versions))
        metrics.lowest_version.set(min(summary.versions.values(), default=0))
        metrics.highest_version.set(max(summary.versions.values(), default=0))
        metrics.slowest_clock.set(self._membership.clocks.slowest)
        metrics.fastest_clock.set(max(clocks, default=self._membership.clocks.slowest))
        consistency = self._membership.consistency
        metrics.clock_bound.set(
            math.inf if consistency.mode is ConsistencyMode.ASP else consistency.bound
        )
        return summary.stored_bytes

    # ----------------------------------------------------------------------- callbacks of its parts

    async def _fetch_layout(self) -> Layout:
        if self._session is None:
            raise UnavailableError(
                "this server is still starting; try again", reason="SERVER_UNREGISTERED"
            )
        return await self._session.layout()

    def _report_backup(self, epoch: int, in_sync: bool, reason: str) -> None:
        if self._session is not None:
            self._session.report_backup(epoch=epoch, in_sync=in_sync, reason=reason)

    def _report_move(
        self, move: int, *, receiver: str = "", reason: str = "", giver_failed: bool = False
    ) -> None:
        if self._session is not None:
            self._session.report_move(
                move, receiver=receiver, reason=reason, giver_failed=giver_failed
            )

    def _receiver(self, agree: Callable[[Configuration], Awaitable[Configuration]]) -> TransferSink:
        return TransferSink(
            job_id=self._settings.job,
            shard=self._shard,
            moves=self._moves,
            membership=self._membership,
            changes=self._changes,
            layout_of=self._layouts.at_least,
            agree=agree,
        )

    async def _adopt_layout(self, layout: Layout) -> None:
        """Adopts a shard map. Raises the errors of `Moves.check`, and UnavailableError:
        JOURNAL_FAILED, CHANGE_PENDING."""
        self._moves.check(layout, before=self._layouts.current)
        if not self._moves.changes_with(layout):
            self._becomes(layout)  # the journal records it before the next change
            return
        made = self._changes.adopt(layout, lambda: self._becomes(layout))
        await self._changes.in_time(lambda: asyncio.shield(made))

    def _becomes(self, layout: Layout) -> None:
        """Makes `layout` the current shard map, unless the current shard map is newer."""
        before = self._layouts.current
        if before is not None and layout.epoch <= before.epoch:
            return  # another call has already adopted this shard map, or a newer one
        held, frozen = frozenset(self._shard.partition_ids()), self._shard.frozen
        taken = (
            frozenset[int]()
            if self._moves.taken is None
            else self._moves.taken.images.keys() & layout.partitions.keys()
        )
        members = self._membership.fence.members | self._membership.fence.evicted.keys()
        self._moves.adopt(layout, before=before, members=members)
        self._layouts.becomes(layout)
        logger.info(
            "shard map", extra={"epoch": layout.epoch, "partitions": len(layout.partitions)}
        )
        if given := held - layout.partitions.keys():
            self._metrics.moved_partitions.labels("given").inc(len(given))
            self._giver.freed(frozen & given)
            failpoint("move.dropped")
        if taken:
            self._metrics.moved_partitions.labels("taken").inc(len(taken))
            failpoint("move.activated")

    def _applied(self, kind: UploadKind, upload: Upload, outcome: Outcome) -> None:
        """Updates the metrics after an upload was applied or turned out to be a duplicate."""
        label = "duplicate" if outcome.duplicate else "applied"
        self._metrics.received_bytes.inc(upload.header.payload_bytes)
        if kind is UploadKind.INITIALIZE:
            self._metrics.initialized.labels(label).inc()
            self._pulls.initialized(outcome.partition_id)
            return
        self._metrics.pushes.labels(label).inc()
        if not outcome.duplicate:
            self._metrics.staleness.observe(outcome.staleness)
            self._metrics.apply_seconds.observe(outcome.apply_seconds)

    def _answered(self, sent: int | None) -> None:
        """Updates the metrics after a pull was answered for one partition. `sent`: bytes of values
        sent; None if the partition was unchanged."""
        self._metrics.pulls.labels("unchanged" if sent is None else "sent").inc()
        self._metrics.sent_bytes.inc(sent or 0)

    def _state(self) -> ServerState | None:
        layout = self._layouts.current
        if layout is None:
            return None
        return ServerState(
            job_id=self._identity.job_id,
            server_id=self._identity.server_id,
            layout=layout,
            configuration=self._servicer.configuration,
            membership=self._members(),
            backup=self._backup.noted,
            settled=self._moves.settled,
            leaving=self._moves.leaving,
        )

    def _first_heard(self) -> None:
        """Schedules a journal record of the members and clocks, because a member's first report may
        come with a pull, and pulls are not in the journal."""
        self._changes.members_changed()

    def _members(self) -> Members:
        return Members.of(self._membership.fence, self._membership.clocks)

    # ------------------------------------------------------------------------------- start and stop

    async def _until_over(self, stop: asyncio.Event, session: CoordinatorSession) -> None:
        """Waits until `stop` is set or the job has ended. If the session ends permanently, raises
        its error."""
        stopped = asyncio.create_task(stop.wait())
        held = asyncio.create_task(session.run())
        snapshots = asyncio.create_task(
            self._snapshots.periodically(self._settings.snapshot_interval)
        )
        replaced = asyncio.create_task(self._primary_place.replaced.wait())
        moving = asyncio.create_task(self._mover.run())
        tasks: list[asyncio.Task[Any]] = [stopped, held, snapshots, replaced, moving]
        ends: list[asyncio.Future[Any]] = [*tasks, self._broken]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if not self._primary_place.replaced.is_set():
                reason = f"the job is over: {held.result()}" if held in done else "asked to"
                logger.info("stopping", extra={"reason": reason})
        finally:
            await end_tasks(tasks)

    def _server_settings(self) -> ServerSettings:
        settings = self._settings
        return ServerSettings(
            listen=str(settings.listen),
            tls=settings.serving_tls,
            tokens=settings.token_table,
            insecure=settings.insecure,
            drain_timeout=settings.drain_timeout,
        )

    def _registration(self, grpc_port: int, http: HttpServer) -> Registration:
        return this_process(
            self._settings,
            address=self._settings.advertised(grpc_port),
            metrics_address=self._settings.advertised_http(http.port),
            run=None if self._directory is None else self._directory.run,
        )

    def _write_port_file(self, grpc_port: int, http: HttpServer) -> None:
        path = self._settings.port_file
        if path is None:
            return
        addresses = {
            "grpc": self._settings.advertised(grpc_port),
            "http": self._settings.advertised_http(http.port),
            "pid": os.getpid(),
        }
        _write_atomically(path, json.dumps(addresses))


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
