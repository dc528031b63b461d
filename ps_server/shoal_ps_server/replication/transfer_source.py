"""Giver's side of a move: freezes partitions, copies them to the receiver, and records in the
journal that they are leaving.

Until this record is written, the server may abandon the move and serve the partitions again. After
that, only the coordinator's decision unfreezes them (service/mover.py), even if this process is
restarted. All copies sent under one move number must be identical. Once the partitions have been
served again, they may have changed, so this server does not send them under the same number a
second time. Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection
from datetime import timedelta
from typing import Final

import grpc
import grpc.aio
from shoal_common.errors import InternalError, PreconditionError, ShoalError, UnavailableError
from shoal_common.failpoints import failpoint
from shoal_common.rpc.channel import ChannelSettings, aio_channel
from shoal_common.rpc.status import from_rpc_error
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_ps_server.metrics import Metrics
from shoal_ps_server.replication.items import FORMAT_VERSION, PARTITION, STATE, WHOLE, Item
from shoal_ps_server.session import MoveOrder, incarnation
from shoal_ps_server.shard.shard import Shard
from shoal_ps_server.storage.changes import Changes
from shoal_ps_server.storage.image import ServerState, configuration_to_json, members_to_json
from shoal_ps_server.storage.moves import Moves
from shoal_ps_server.storage.recovery import coming_fields, leaving_record

logger = logging.getLogger(__name__)

_MOVE_LIMIT: Final = timedelta(seconds=20)
"""Maximum time until the receiver has all partitions of a move."""
_IDLE_LIMIT: Final = timedelta(seconds=5)
"""Maximum time in which the receiver neither responds nor accepts data."""
_TAKE: Final = "/shoal.v1.ParameterServer/TakePartitions"


class NotTaken(Exception):
    """Raised if a move failed through no fault of the giver: the receiver is absent, refuses the
    partitions, or does not accept them in time."""

    def __init__(self, error: ShoalError) -> None:
        super().__init__(str(error))
        self.error = error
        """Cause of the failure."""


class TransferSource:
    """Giver's side of all moves of one server."""

    def __init__(
        self,
        *,
        shard: Shard,
        moves: Moves,
        changes: Changes,
        state: Callable[[], ServerState | None],
        wake: Callable[[], None],
        channel: Callable[[str], ChannelSettings],
        metrics: Metrics,
        move_limit: timedelta = _MOVE_LIMIT,
        idle_limit: timedelta = _IDLE_LIMIT,
    ) -> None:
        """`state`: returns the server's state except its partitions. `wake`: makes waiting calls
        check their conditions again. `channel`: returns the settings for calls to the server at an
        address."""
        self._shard = shard
        self._moves = moves
        self._changes = changes
        self._state = state
        self._wake = wake
        self._channel = channel
        self._metrics = metrics
        self._move_limit_s = move_limit.total_seconds()
        self._idle_limit_s = idle_limit.total_seconds()
        self._frozen_from = time.perf_counter()
        self._given_up = 0
        """Number of the newest move that this process has abandoned in order to serve the
        partitions again."""
        self._given = (0, "")
        """Number of the newest move whose receiver has all partitions, and the incarnation of the
        receiving process."""

    async def give(self, order: MoveOrder) -> str:
        """Hands partitions over to the receiver. Returns the incarnation of the receiving process,
        once it has the partitions and this server's journal records that they are leaving. From
        then on, only the coordinator decides which server has them.

        Raises NotTaken if the receiver did not receive the partitions, and a ShoalError if this
        server could not send them. In both cases the partitions are served again, unless an earlier
        attempt has recorded that they are leaving.
        """
        if self._moves.leaving is not None and self._moves.leaving.move == order.move:
            if self._given[0] != order.move:
                self._given = (order.move, await self._hand_over(order))
            return self._given[1]  # the coordinator may not have read the report yet
        if order.giver_incarnation != incarnation() or order.move <= self._given_up:
            raise UnavailableError(
                f"move {order.move} was abandoned: this server resumed serving its partitions, so "
                "a copy already sent may be outdated; start a new move",
                reason="MOVE_GIVEN_UP",
            )
        self._check(order)
        self._frozen_from = time.perf_counter()
        self._shard.freeze(order.partition_ids)
        self._wake()
        try:
            receiver = await self._hand_over(order)
        except BaseException:
            self._thaw(order)
            raise
        await asyncio.shield(
            self._changes.move(
                leaving_record(order.move, sorted(order.partition_ids)),
                lambda: self._moves.leave(order.move, order.partition_ids),
                refused=lambda: self._thaw(order),
            )
        )
        self._given = (order.move, receiver)
        failpoint("move.noted")
        return receiver

    def freed(self, partition_ids: Collection[int]) -> None:
        """Records how long partitions were frozen, and wakes the calls that are waiting for them.
        Must be called when the partitions of a move have been unfrozen, or have been dropped
        because they now belong to the receiver."""
        if partition_ids:
            self._metrics.frozen_seconds.observe(time.perf_counter() - self._frozen_from)
            self._wake()

    def _thaw(self, order: MoveOrder) -> None:
        self._given_up = order.move
        self._shard.thaw(order.partition_ids)
        self.freed(order.partition_ids)

    def _check(self, order: MoveOrder) -> None:
        versions = self._shard.summary().versions
        state = self._state()
        if state is None or order.receiver_index == state.layout.server_index:
            raise PreconditionError(
                f"move {order.move}: "
                + (
                    "this server has no shard map yet"
                    if state is None
                    else f"the receiver, server {order.receiver_index}, is this server"
                ),
                reason="LAYOUT_CONFLICT",
            )
        if self._moves.leaving is not None:
            raise UnavailableError(
                f"move {order.move}: the partitions of move {self._moves.leaving.move} are still "
                "leaving; try again",
                reason="PARTITION_MOVING",
            )
        for partition_id in order.partition_ids:
            if partition_id not in versions:
                raise PreconditionError(
                    f"move {order.move}: partition {partition_id} does not belong to this server "
                    f"(shard map epoch {state.layout.epoch})",
                    reason="LAYOUT_CONFLICT",
                )
            if not versions[partition_id]:
                raise PreconditionError(
                    f"move {order.move}: partition {partition_id} has no values yet; initialize "
                    "it first",
                    reason="PARTITION_UNINITIALIZED",
                )

    async def _hand_over(self, order: MoveOrder) -> str:
        """Sends the frozen partitions of a move to the receiver within a time limit. Returns the
        receiver's incarnation. Raises the errors of `give`."""
        if not order.receiver_address:
            raise NotTaken(
                UnavailableError(
                    f"move {order.move}: server {order.receiver_index} is not available",
                    reason="RECEIVER_AWAY",
                )
            )
        is_sending = False
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._move_limit_s
        try:
            async with asyncio.timeout(self._idle_limit_s) as limit:
                await self._changes.made(order.partition_ids)
                is_sending = True
                failpoint("move.frozen")

                def progress() -> None:
                    if not limit.expired():
                        limit.reschedule(min(ends, loop.time() + self._idle_limit_s))

                progress()
                return await self._transfer(order, progress)
        except InternalError:
            raise
        except ShoalError as error:
            raise NotTaken(error) from error
        except TimeoutError as error:
            if not is_sending:
                raise UnavailableError(
                    f"move {order.move}: pending changes to the partitions did not reach this "
                    f"server's disk or backup within {self._idle_limit_s:g} s",
                    reason="CHANGE_PENDING",
                ) from error
            slow = UnavailableError(
                f"move {order.move}: server {order.receiver_index} at {order.receiver_address} "
                f"received nothing for {self._idle_limit_s:g} s, or did not finish within "
                f"{self._move_limit_s:g} s",
                reason="RECEIVER_SLOW",
            )
            raise NotTaken(slow) from error

    async def _transfer(self, order: MoveOrder, progress: Callable[[], None]) -> str:
        channel = aio_channel(self._channel(order.receiver_address))
        try:
            take = channel.stream_unary(
                _TAKE, response_deserializer=pb.TakePartitionsResponse.FromString
            )
            answer: pb.TakePartitionsResponse = await take(
                self._chunks(order, progress), timeout=self._move_limit_s
            )
            return answer.incarnation
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # grpc.aio cancels a call whose messages cannot be produced, and has logged the reason.
            raise InternalError(
                f"move {order.move}: could not assemble the data to send"
            ) from error
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INTERNAL:
                # If the connection breaks during a send, grpc reports this status instead of the
                # actual one.
                raise UnavailableError(
                    f"move {order.move}: the stream broke", reason="SESSION_BROKEN"
                ) from error
            raise from_rpc_error(
                error, call=f"TakePartitions at {order.receiver_address}"
            ) from error
        finally:
            await channel.close()

    async def _chunks(
        self, order: MoveOrder, progress: Callable[[], None]
    ) -> AsyncGenerator[bytes]:
        """Yields the encoded chunks sent to the receiver: the server's state, then each
        partition."""
        state = self._state()
        assert state is not None, "it holds partitions"
        fields = {
            "format": FORMAT_VERSION,
            "job_id": state.job_id,
            "move": order.move,
            "epoch": state.layout.epoch,
            "partitions": sorted(order.partition_ids),
            "configuration": None
            if state.configuration is None
            else configuration_to_json(state.configuration),
            "members": members_to_json(state.membership),
            "batches": self._shard.batches.runs(),
        }
        for chunk in Item(kind=STATE, fields=fields).encoded():
            yield chunk
        for partition_id in sorted(order.partition_ids):
            entry, data = await asyncio.to_thread(
                coming_fields, self._shard.frozen_image(partition_id)
            )
            for chunk in Item(kind=PARTITION, fields=entry, payload=memoryview(data)).encoded():
                progress()
                yield chunk
        for chunk in Item(kind=WHOLE).encoded():
            progress()
            yield chunk
