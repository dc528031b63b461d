"""This server's session with the coordinator: registration, heartbeats, the members of each
generation, the shard map, and partitions that move to other servers.

The session may break and be opened again at any time: pushes and pulls go on meanwhile with the
members known last. Only a refusal before the first welcome, the end of its run, and a place taken
over by another process of the same server_id, end the server. Belongs to the event loop.
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
from shoal_common.rpc.channel import ChannelSettings, aio_channel, is_name
from shoal_common.rpc.status import from_rpc_error
from shoal_common.runs import Run
from shoal_protos.v1 import coordinator_pb2
from shoal_protos.v1.coordinator_pb2_grpc import CoordinatorStub

from shoal_ps_server.settings import PsServerSettings
from shoal_ps_server.shard.layout import Layout, layout_from_shard_map

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S: Final = 0.1
_LONGEST_BACKOFF_S: Final = 3.0
_WELCOME_LIMIT: Final = timedelta(seconds=10)
"""How long a coordinator may take to answer a registration."""
_REGISTRATION_WAIT: Final = timedelta(seconds=5)
"""How long a request that needs the shard map may wait for this server's registration."""
_PERMANENT: Final = (
    AuthenticationError,
    ConfigurationError,
    InvalidRequestError,
    PermissionDeniedError,
    PreconditionError,
)
_CONFLICT: Final = "SERVER_CONFLICT"
"""Another process has this server's place: one that is gone, which the coordinator has not noticed
yet, or, when this one was registered before, one that has taken it over while this one was cut
off."""
_RUN_ENDED: Final = "RUN_ENDED"
_RUN_UNKNOWN: Final = "RUN_UNKNOWN"
_LOST_RUN_WAIT: Final = timedelta(seconds=15)
"""How long members of a run that the coordinator has lost may take to come back to it, and say that
the run goes on."""


class AnotherRunError(PreconditionError):
    """The run of what this server holds is over, or lost: nobody will ask for that any more. It is
    set aside, and the server begins anew."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What the coordinator says that this server is: shoal.v1.ServerPlace."""

    epoch: int
    follows: bool
    """It is a backup; else a primary."""
    primary_address: str
    """Whom a backup follows; empty: the primary is away."""
    backup_id: str
    """The backup that is there; empty: none."""
    in_sync: bool
    """That one may take the primary's place."""


@dataclass(frozen=True, kw_only=True)
class MoveOrder:
    """The coordinator asks this server to hand partitions to another one:
    shoal.v1.MovePartitions."""

    move: int
    partition_ids: frozenset[int]
    receiver_index: int
    receiver_address: str
    """Empty: the receiver is away."""
    giver_incarnation: str
    """The process that was told first."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a server knows of its job from before, and the coordinator may have lost."""

    generation: int = 0
    """The newest one; 0: none."""
    server_index: int | None = None
    """The place whose partitions it holds; None: it holds none."""


class Listener(Protocol):
    """What hears the coordinator."""

    def welcomed(self, server_index: int, *, with_backups: bool, run: Run | None) -> None:
        """The session is open; at every reconnection again. `with_backups`: the job's servers have
        some. `run`: the one that this server belongs to from now on; None: the coordinator does not
        say. Raises ConfigurationError when the server cannot be that one."""

    def known(self) -> Known:
        """For the registration."""

    def disconnected(self) -> None:
        """The session is broken and will be opened again."""

    def members(
        self, generation: int, member_ids: tuple[str, ...], key_digests: Mapping[str, str]
    ) -> None:
        """The members of a generation, and the digests of the keys of those that have one. Raises
        ConfigurationError when the server cannot be one of theirs."""

    def placed(self, place: Place) -> None:
        """What this server is; after every welcome, and at every change."""

    def settled(self, move: int, epoch: int) -> None:
        """The coordinator has decided on all moves up to this one: the shard map of this epoch or a
        newer one says how."""

    def ordered(self, order: MoveOrder) -> None:
        """Partitions are to be given away. It may come again for the same move."""

    def stored_bytes(self) -> int:
        """For the heartbeat."""


@dataclass(frozen=True, kw_only=True)
class Registration:
    """What the coordinator is told of this server."""

    job_id: str
    server_id: str
    address: str
    """Empty: it serves nobody."""
    metrics_address: str
    host: str
    pid: int
    incarnation: str = ""
    run: Run | None = None
    """The run of what the server holds; None: it holds nothing."""


@functools.cache
def incarnation() -> str:
    """What tells this process from one that was started in its place."""
    return secrets.token_hex(16)


def this_process(
    settings: PsServerSettings, *, address: str, metrics_address: str, run: Run | None
) -> Registration:
    """Makes the registration of this server, which this process is. `run`: of what it holds."""
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
    """One session, opened anew as often as it breaks."""

    def __init__(
        self, settings: ChannelSettings, registration: Registration, listener: Listener
    ) -> None:
        self._settings = settings
        self._channel = aio_channel(settings)
        self._stub = CoordinatorStub(self._channel)
        self._retired: grpc.aio.Channel | None = None
        """The channel before, on which a call may be in progress."""
        self._registration = registration
        self._listener = listener
        self._run = registration.run
        self._lost_at: float | None = None
        """Since when the coordinator has said that it does not know the run, on the loop's
        clock."""
        self._server_index: int | None = None
        """Set by the first welcome."""
        self._registered = asyncio.Event()
        self._sending: _Sending | None = None
        """What the stream that is open has still to send."""

    async def run(self) -> str:
        """Holds the session until the coordinator says that the job is over; returns its reason.

        Raises the coordinator's refusal of the first registration, AnotherRunError when the run of
        what this server holds is over, or is not known, PreconditionError / SERVER_CONFLICT when
        another process has taken this server's place, and ConfigurationError when the listener
        cannot be the server that the coordinator takes it for.
        """
        backoff = Backoff(first_s=_FIRST_BACKOFF_S, longest_s=_LONGEST_BACKOFF_S)
        while True:
            opened = _Opened()
            try:
                return await self._hold(opened)
            except ShoalError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    # grpc.aio can end a read that is cancelled with the call's error instead
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
                    "no session with the coordinator",
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
        """The current shard map, as far as it concerns this server.

        Raises PreconditionError / TENSORS_UNDECLARED, and UnavailableError when the coordinator
        cannot be asked or has not welcomed this server yet.
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
        """A primary's word on its backup. Lost while the session is broken: say it again when the
        place is told anew."""
        if self._sending is not None:
            report = coordinator_pb2.BackupReport(epoch=epoch, in_sync=in_sync, reason=reason)
            self._sending.say(coordinator_pb2.ServerMessage(backup=report))

    def report_move(
        self, move: int, *, receiver: str = "", reason: str = "", giver_failed: bool = False
    ) -> None:
        """What became of a move: the incarnation of the process that has the partitions, or why
        none has, and whether that is this server's fault. Lost while the session is broken: the
        coordinator asks again."""
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
        """Ends the session and its connection."""
        for channel in (self._channel, self._retired):
            if channel is not None:
                await channel.close()

    async def _renew(self) -> None:
        """Takes a fresh channel, where the coordinator has a name that may stand for another
        address by now (`is_name`)."""
        if not is_name(self._settings.address):
            return
        if self._retired is not None:
            await self._retired.close()
        self._retired, self._channel = self._channel, aio_channel(self._settings)
        self._stub = CoordinatorStub(self._channel)

    async def _hold(self, opened: _Opened) -> str:
        """One stream, from registration to its end. Returns when the job is over, else raises why
        it ended."""
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
                        told = directive.members
                        # an older coordinator tells none
                        keyed = zip(told.member_ids, told.key_digests, strict=False)
                        digests = {member: digest.hex() for member, digest in keyed if digest}
                        self._listener.members(told.generation, tuple(told.member_ids), digests)
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
                # grpc.aio puts this in the place of the real status when that comes while a
                # heartbeat is being written.
                raise UnavailableError(
                    "the stream broke while something was written to it", reason="SESSION_BROKEN"
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
                    "this server has not been able to register with the coordinator at "
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
                f"no welcome from the coordinator at {self._settings.address} within "
                f"{_WELCOME_LIMIT.total_seconds():g} s",
                reason="WELCOME_TIMEOUT",
            ) from error
        if first is grpc.aio.EOF or first.WhichOneof("directive") != "welcome":
            raise UnavailableError(
                "the coordinator ended the session before it said welcome", reason="SESSION_ENDED"
            )
        welcome: coordinator_pb2.ServerWelcome = first.welcome
        return welcome

    async def _messages(self, sending: _Sending) -> AsyncGenerator[coordinator_pb2.ServerMessage]:
        """What this server says in one stream. Not with `call.write`: beside interceptors, which a
        token is, grpc.aio feeds that from a queue whose reader it leaves behind, for ever, when the
        call fails."""
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
        """Nobody will ask for what this server holds any more. Of a run that the coordinator does
        not know members may yet come back."""
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
    """How far one stream came."""

    welcomed: bool = False


class _Sending:
    """When the next message of a stream is due."""

    def __init__(self) -> None:
        self._interval_s: float | None = None
        self._changed = asyncio.Event()
        self._ended = False
        self.said: deque[coordinator_pb2.ServerMessage] = deque()
        """What is to be sent before the next heartbeat."""

    def heartbeats_every(self, interval: timedelta) -> None:
        """The first one is due at once."""
        self._interval_s = interval.total_seconds()
        self._changed.set()

    def say(self, message: coordinator_pb2.ServerMessage) -> None:
        """It is sent at once."""
        self.said.append(message)
        self._changed.set()

    def end(self) -> None:
        """Nothing more is to be said."""
        self._ended = True
        self._changed.set()

    async def due(self) -> bool:
        """Waits until something is to be sent; False at the end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._interval_s):
                await self._changed.wait()
                self._changed.clear()
        return not self._ended
