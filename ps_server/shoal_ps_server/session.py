"""This server's session with the coordinator: registration, heartbeats, the members of each
generation, the shard map, and moves of partitions to other servers.

The session may break and be reopened at any time; while it is broken, pushes and pulls continue
with the last known members. The server exits only if the coordinator refuses its first
registration, if its run ends, or if a different process with the same server_id takes its place.
Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol

import grpc
import grpc.aio
from shoal_common.backoff import Backoff
from shoal_common.errors import (
    AuthenticationError,
    ConfigurationError,
    InvalidRequestError,
    PermissionDeniedError,
    PreconditionError,
    ShoalError,
    UnavailableError,
)
from shoal_common.formats.runs import Run
from shoal_common.rpc.channel import ChannelSettings, aio_channel, is_name
from shoal_common.rpc.status import from_rpc_error
from shoal_protos.v1 import coordinator_pb2
from shoal_protos.v1.coordinator_pb2_grpc import CoordinatorStub

from shoal_ps_server.settings import PsServerSettings
from shoal_ps_server.shard.layout import Layout, layout_from_shard_map

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S: Final = 0.1
_LONGEST_BACKOFF_S: Final = 3.0
_WELCOME_LIMIT: Final = timedelta(seconds=10)
"""Maximum time for a coordinator to respond to a registration."""
_REGISTRATION_WAIT: Final = timedelta(seconds=5)
"""Maximum wait until this server is registered, for a request that needs the shard map."""
_PERMANENT: Final = (
    AuthenticationError,
    ConfigurationError,
    InvalidRequestError,
    PermissionDeniedError,
    PreconditionError,
)
_CONFLICT: Final = "SERVER_CONFLICT"
"""Reason code of the error that is raised if a different process has this server's place. The
coordinator may not have noticed yet that the other process has died. If this process was registered
before, the other process may have taken over while this one was cut off."""
_RUN_ENDED: Final = "RUN_ENDED"
_RUN_UNKNOWN: Final = "RUN_UNKNOWN"
_LOST_RUN_WAIT: Final = timedelta(seconds=15)
"""Maximum time for the members of a run to return and continue it after the coordinator has lost
its record of the run."""


class AnotherRunError(PreconditionError):
    """Raised if the run that this server's state belongs to has ended or is lost, so that nobody
    will request the state any more. The server then sets the state aside and starts empty."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """This server's place in the job, as assigned by the coordinator: its share of the tensors, and
    its role (shoal.v1.ServerPlace)."""

    epoch: int
    follows: bool
    """True if this server is a backup, which follows a primary."""
    primary_address: str
    """Address of the primary that a backup follows; empty while the primary is absent."""
    backup_id: str
    """Id of the current backup; empty if there is none."""
    in_sync: bool
    """True if the current backup may take over from the primary."""


@dataclass(frozen=True, kw_only=True)
class MoveOrder:
    """Order to hand over partitions to another server (shoal.v1.MovePartitions)."""

    move: int
    partition_ids: frozenset[int]
    receiver_index: int
    receiver_address: str
    """Address of the receiver; empty while the receiver is absent."""
    giver_incarnation: str
    """Incarnation of the process that first received the order."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """Information about a job that a server reports when it registers, because the coordinator may
    have lost it."""

    generation: int = 0
    """Newest known generation; 0 if there is none."""
    server_index: int | None = None
    """Place whose partitions the server has; None if it has no partitions."""


class Listener(Protocol):
    """Receiver of the coordinator's messages in a session."""

    def welcomed(self, server_index: int, *, with_backups: bool, run: Run | None) -> None:
        """Called when the session is opened, and whenever it is reopened. Raises ConfigurationError
        if the server cannot take the place `server_index`.

        `with_backups`: True if the job's servers have backups. `run`: this server's run from now
        on; None if the coordinator does not send it.
        """

    def known(self) -> Known:
        """Returns the facts to send with the registration."""

    def disconnected(self) -> None:
        """Called when the session breaks. It will be reopened."""

    def members(
        self, generation: int, member_ids: tuple[str, ...], key_digests: Mapping[str, str]
    ) -> None:
        """Called with the members of a generation and the digests of their keys. Raises
        ConfigurationError if this server's state belongs to an earlier job with the same id."""

    def placed(self, place: Place) -> None:
        """Called with this server's place, after each welcome and whenever the place changes."""

    def settled(self, move: int, epoch: int) -> None:
        """Called when the coordinator has decided all moves up to `move`. The shard map of `epoch`,
        or a newer one, contains the outcome."""

    def ordered(self, order: MoveOrder) -> None:
        """Called with an order to give partitions away. The same move may be ordered more than
        once."""

    def stored_bytes(self) -> int:
        """Returns the number of stored bytes, for heartbeats."""


@dataclass(frozen=True, kw_only=True)
class Registration:
    """This server's description of itself, sent to the coordinator when it registers."""

    job_id: str
    server_id: str
    address: str
    """Address of the server for workers; empty if the server does not accept workers' calls."""
    metrics_address: str
    host: str
    pid: int
    incarnation: str = ""
    run: Run | None = None
    """Run that the server's state belongs to; None if it has no state."""


@functools.cache
def incarnation() -> str:
    """Returns an id that distinguishes this process from earlier and later processes of the same
    server."""
    return secrets.token_hex(16)


def this_process(
    settings: PsServerSettings, *, address: str, metrics_address: str, run: Run | None
) -> Registration:
    """Returns the data with which this process registers. `run`: run that the server's state
    belongs to; None if it has no state."""
    return Registration(
        job_id=settings.job,
        server_id=settings.server_id,
        address=address,
        metrics_address=metrics_address,
        host=socket.gethostname(),
        pid=os.getpid(),
        incarnation=incarnation(),
        run=run,
    )


class CoordinatorSession:
    """Session with the coordinator, which is reopened whenever it breaks."""

    def __init__(
        self, settings: ChannelSettings, registration: Registration, listener: Listener
    ) -> None:
        self._settings = settings
        self._channel = aio_channel(settings)
        self._stub = CoordinatorStub(self._channel)
        self._retired: grpc.aio.Channel | None = None
        """The previous channel, on which a call may still be in progress."""
        self._registration = registration
        self._listener = listener
        self._run = registration.run
        self._lost_at: float | None = None
        """Time, by the event loop's clock, at which the coordinator first reported that it has no
        record of the run; None if it has a record."""
        self._server_index: int | None = None
        """Index of this server's place; None before the first welcome."""
        self._registered = asyncio.Event()
        self._sending: _Sending | None = None
        """Outgoing messages of the open stream."""

    async def run(self) -> str:
        """Keeps the session open until the coordinator reports that the job has ended. Returns the
        reason.

        Raises:
            AnotherRunError: the run that this server's state belongs to has ended or is unknown.
            PreconditionError: SERVER_CONFLICT if a different process has taken this server's place.
            ConfigurationError: the listener cannot take the assigned place.
            ShoalError: the coordinator refused the first registration.
        """
        backoff = Backoff(first_s=_FIRST_BACKOFF_S, longest_s=_LONGEST_BACKOFF_S)
        while True:
            opened = _Opened()
            try:
                return await self._hold(opened)
            except ShoalError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    # grpc.aio may raise the call's error instead of CancelledError for a cancelled
                    # read
                    raise asyncio.CancelledError from error
                if (
                    error.reason == _RUN_ENDED
                    and isinstance(error, PreconditionError)
                    and self._server_index is not None
                ):
                    return str(error)
                if self._is_of_another_run(error):
                    raise AnotherRunError(str(error), reason=error.reason) from error
                if self._is_final(error):
                    raise
                if opened.welcomed:
                    backoff.reset()
                again_in_s = backoff.next_s(error)
                logger.warning(
                    "the session with the coordinator failed; will retry",
                    extra={
                        "address": self._settings.address,
                        "reason": error.reason,
                        "error": error,
                        "again_in_s": round(again_in_s, 3),
                    },
                )
            finally:
                if opened.welcomed:
                    self._listener.disconnected()
            await asyncio.sleep(again_in_s)
            await self._renew()

    async def layout(self) -> Layout:
        """Returns this server's part of the current shard map.

        Raises PreconditionError / TENSORS_UNDECLARED. Raises UnavailableError if the coordinator
        cannot be reached or has not accepted this server's registration yet.
        """
        server_index = await self._registered_index()
        request = coordinator_pb2.GetShardMapRequest(
            job_id=self._registration.job_id, run=_run_message(self._run)
        )
        try:
            answer = await self._stub.GetShardMap(
                request, timeout=self._settings.deadline.total_seconds()
            )
        except grpc.aio.AioRpcError as error:
            raise self._explained("GetShardMap", error) from error
        return layout_from_shard_map(answer.shard_map, server_index=server_index)

    def report_backup(self, *, epoch: int, in_sync: bool, reason: str = "") -> None:
        """Sends a report about this primary's backup. A report made while the session is broken is
        lost. It must be made again when the coordinator next sends this server its place."""
        if self._sending is not None:
            report = coordinator_pb2.BackupReport(epoch=epoch, in_sync=in_sync, reason=reason)
            self._sending.say(coordinator_pb2.ServerMessage(backup=report))

    def report_move(
        self, move: int, *, receiver: str = "", reason: str = "", giver_failed: bool = False
    ) -> None:
        """Sends the outcome of a move. While the session is broken, the report is lost; the
        coordinator then asks again.

        Args:
            move: move number, as assigned by the coordinator.
            receiver: incarnation of the process that has received the partitions; empty if the move
                failed.
            reason: reason why the move failed.
            giver_failed: True if the failure is this server's fault.
        """
        if self._sending is not None:
            report = coordinator_pb2.MoveReport(
                move=move,
                taken=bool(receiver),
                receiver_incarnation=receiver,
                reason=reason,
                giver_failed=giver_failed,
            )
            self._sending.say(coordinator_pb2.ServerMessage(move=report))

    async def close(self) -> None:
        """Closes the session and its connection."""
        for channel in (self._channel, self._retired):
            if channel is not None:
                await channel.close()

    async def _renew(self) -> None:
        """Replaces the channel if the coordinator's address contains a host name (`is_name`), which
        may resolve to a different address by now."""
        if not is_name(self._settings.address):
            return
        if self._retired is not None:
            await self._retired.close()
        self._retired, self._channel = self._channel, aio_channel(self._settings)
        self._stub = CoordinatorStub(self._channel)

    async def _hold(self, opened: _Opened) -> str:
        """Serves one stream from the registration until it is closed. Returns when the job has
        ended; otherwise raises the error that closed the stream."""
        sending = _Sending()
        call = self._stub.ServerSession(self._messages(sending))
        try:
            welcome = await self._welcome(call)
            run = _welcomed_run(welcome)
            self._listener.welcomed(
                welcome.server_index,
                with_backups=welcome.spec.parameter_server_backups > 0,
                run=run,
            )
            self._run, self._lost_at = run or self._run, None
            self._server_index, opened.welcomed = welcome.server_index, True
            self._registered.set()
            sending.heartbeats_every(timedelta(milliseconds=welcome.heartbeat_interval_ms))
            self._sending = sending
            while True:
                directive = await call.read()
                if directive is grpc.aio.EOF:
                    raise UnavailableError(
                        "the coordinator ended the session", reason="SESSION_ENDED"
                    )
                match directive.WhichOneof("directive"):
                    case "members":
                        members = directive.members
                        # an older coordinator sends no digests
                        keyed = zip(members.member_ids, members.key_digests, strict=False)
                        digests = {member: digest.hex() for member, digest in keyed if digest}
                        self._listener.members(
                            members.generation, tuple(members.member_ids), digests
                        )
                    case "place":
                        self._listener.placed(_place(directive.place))
                    case "settled":
                        self._listener.settled(directive.settled.move, directive.settled.epoch)
                    case "move":
                        self._listener.ordered(_order(directive.move))
                    case "stop":
                        return str(directive.stop.reason)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INTERNAL:
                # grpc.aio reports this status instead of the actual one if that arrives while a
                # heartbeat is being written.
                raise UnavailableError(
                    "the stream broke during a write", reason="SESSION_BROKEN"
                ) from error
            raise self._explained("ServerSession", error) from error
        finally:
            self._sending = None
            sending.end()
            call.cancel()

    async def _registered_index(self) -> int:
        if self._server_index is None:
            try:
                async with asyncio.timeout(_REGISTRATION_WAIT.total_seconds()):
                    await self._registered.wait()
            except TimeoutError as error:
                raise UnavailableError(
                    "this server has not yet registered with the coordinator at "
                    f"{self._settings.address}; try again",
                    reason="SERVER_UNREGISTERED",
                ) from error
        assert self._server_index is not None, "it is set before the event"
        return self._server_index

    async def _welcome(self, call: grpc.aio.StreamStreamCall) -> coordinator_pb2.ServerWelcome:
        try:
            async with asyncio.timeout(_WELCOME_LIMIT.total_seconds()):
                first = await call.read()
        except TimeoutError as error:
            raise UnavailableError(
                f"the coordinator at {self._settings.address} sent no welcome within "
                f"{_WELCOME_LIMIT.total_seconds():g} s",
                reason="WELCOME_TIMEOUT",
            ) from error
        if first is grpc.aio.EOF or first.WhichOneof("directive") != "welcome":
            raise UnavailableError(
                "the coordinator ended the session before it sent a welcome", reason="SESSION_ENDED"
            )
        welcome: coordinator_pb2.ServerWelcome = first.welcome
        return welcome

    async def _messages(self, sending: _Sending) -> AsyncGenerator[coordinator_pb2.ServerMessage]:
        """Yields the messages to send on one stream. The stream reads from this generator instead
        of using `call.write`: if the channel has interceptors (e.g. for a token), `call.write` uses
        a queue, and the task that reads the queue is leaked if the call fails."""
        yield coordinator_pb2.ServerMessage(register=self._register_message())
        while await sending.due():
            while sending.said:
                yield sending.said.popleft()
            yield coordinator_pb2.ServerMessage(
                heartbeat=coordinator_pb2.ServerHeartbeat(
                    stored_bytes=self._listener.stored_bytes()
                )
            )

    def _register_message(self) -> coordinator_pb2.RegisterServer:
        registration, known = self._registration, self._listener.known()
        return coordinator_pb2.RegisterServer(
            job_id=registration.job_id,
            server_id=registration.server_id,
            address=registration.address,
            metrics_address=registration.metrics_address,
            host=registration.host,
            pid=registration.pid,
            incarnation=registration.incarnation,
            run=_run_message(self._run),
            generation=known.generation,
            held_place=0 if known.server_index is None else known.server_index + 1,
        )

    def _is_of_another_run(self, error: ShoalError) -> bool:
        """Returns whether `error` means that this server's run has ended or is lost, so that its
        state will never be requested again.

        If the members of a lost run may still continue it, the error is an UnavailableError. To
        give the members time to return, such an error has this meaning only once _LOST_RUN_WAIT has
        passed since the first one."""
        if error.reason == _RUN_UNKNOWN and isinstance(error, UnavailableError):
            now = asyncio.get_running_loop().time()
            self._lost_at = now if self._lost_at is None else self._lost_at
            return now > self._lost_at + _LOST_RUN_WAIT.total_seconds()
        return (
            error.reason in (_RUN_ENDED, _RUN_UNKNOWN)
            and isinstance(error, PreconditionError)
            and self._run is not None
        )

    def _is_final(self, error: ShoalError) -> bool:
        if isinstance(error, ConfigurationError):
            return True
        was_registered = self._server_index is not None
        if error.reason == _CONFLICT:
            return was_registered
        return not was_registered and isinstance(error, _PERMANENT)

    def _explained(self, method: str, error: grpc.RpcError) -> ShoalError:
        return from_rpc_error(error, call=f"{method} at {self._settings.address}")


def _run_message(run: Run | None) -> coordinator_pb2.RunId | None:
    return (
        None
        if run is None
        else coordinator_pb2.RunId(number=run.number, began_unix_ms=run.began_unix_ms)
    )


def _welcomed_run(welcome: coordinator_pb2.ServerWelcome) -> Run | None:
    return (
        Run(number=welcome.run.number, began_unix_ms=welcome.run.began_unix_ms)
        if welcome.run.number
        else None
    )


def _place(message: coordinator_pb2.ServerPlace) -> Place:
    return Place(
        epoch=message.epoch,
        follows=message.role == coordinator_pb2.SERVER_ROLE_BACKUP,
        primary_address=message.primary_address,
        backup_id=message.backup_id,
        in_sync=message.in_sync,
    )


def _order(message: coordinator_pb2.MovePartitions) -> MoveOrder:
    return MoveOrder(
        move=message.move,
        partition_ids=frozenset(message.partition_ids),
        receiver_index=message.receiver_index,
        receiver_address=message.receiver_address,
        giver_incarnation=message.giver_incarnation,
    )


class _Opened:
    """Result of one session stream so far: `welcomed` is True once the coordinator has accepted the
    registration."""

    welcomed: bool = False


class _Sending:
    """Outgoing messages of one session stream, and the times at which heartbeats are due."""

    def __init__(self) -> None:
        self._interval_s: float | None = None
        self._changed = asyncio.Event()
        self._ended = False
        self.said: deque[coordinator_pb2.ServerMessage] = deque()
        """Messages to be sent before the next heartbeat."""

    def heartbeats_every(self, interval: timedelta) -> None:
        """Starts heartbeats; the first one is due immediately."""
        self._interval_s = interval.total_seconds()
        self._changed.set()

    def say(self, message: coordinator_pb2.ServerMessage) -> None:
        """Schedules a message to be sent as soon as possible."""
        self.said.append(message)
        self._changed.set()

    def end(self) -> None:
        """Stops sending; `due` returns False from now on."""
        self._ended = True
        self._changed.set()

    async def due(self) -> bool:
        """Waits until a message is due. Returns False once `end` has been called."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._interval_s):
                await self._changed.wait()
                self._changed.clear()
        return not self._ended
