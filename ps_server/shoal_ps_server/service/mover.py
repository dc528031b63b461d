"""Carries out the coordinator's orders to move partitions, one move at a time: first applies the
outcome of the last move, then gives partitions away.

Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from shoal_common.backoff import Backoff
from shoal_common.errors import PreconditionError, ShoalError
from shoal_common.failpoints import failpoint
from shoal_common.tasks import end_tasks

from shoal_ps_server.replication.transfer_source import NotTaken, TransferSource
from shoal_ps_server.service.layouts import Layouts
from shoal_ps_server.session import MoveOrder
from shoal_ps_server.storage.changes import Changes
from shoal_ps_server.storage.moves import Moves
from shoal_ps_server.storage.recovery import settled_record

logger = logging.getLogger(__name__)


class Report(Protocol):
    """Function that reports the outcome of a move to the coordinator."""

    def __call__(
        self, move: int, *, receiver: str = "", reason: str = "", giver_failed: bool = False
    ) -> None:
        """`receiver`: incarnation of the process that has received the partitions. `reason`: reason
        for a failure. `giver_failed`: True if the failure is this server's fault."""


class Mover:
    """Carries out the moves of one server's partitions."""

    def __init__(
        self,
        *,
        moves: Moves,
        giver: TransferSource,
        layouts: Layouts,
        changes: Changes,
        report: Report,
    ) -> None:
        self._moves = moves
        self._giver = giver
        self._layouts = layouts
        self._changes = changes
        self._report = report
        self._decided: tuple[int, int] | None = None
        """Number of the last move that the coordinator has decided, and the epoch of the shard map
        that contains the move's outcome; None once the outcome has been applied."""
        self._order: MoveOrder | None = None
        self._giving: tuple[int, asyncio.Task[None]] | None = None
        """Number and task of the move in progress; None if there is none."""
        self._notified = asyncio.Event()

    def settled(self, move: int, epoch: int) -> None:
        """Records that the coordinator has decided all moves up to `move`."""
        self._decided = max(self._decided or (0, 0), (move, epoch))
        if self._giving is not None and self._giving[0] <= move:
            # the coordinator decided without waiting for this server's report
            self._giving[1].cancel()
        self._notified.set()

    def ordered(self, order: MoveOrder) -> None:
        """Records an order to give partitions away. An order for the move in progress has no
        effect, since that move's report will follow."""
        if self._giving is None or self._giving[0] != order.move:
            self._order = order
            self._notified.set()

    async def run(self) -> None:
        """Carries out decisions and orders until cancelled."""
        while True:
            await self._notified.wait()
            self._notified.clear()
            if self._decided is not None:
                await self._settle()
            if self._decided is None and self._order is not None:
                order, self._order = self._order, None
                if order.move > self._moves.settled:
                    await self._give(order)

    async def _settle(self) -> None:
        """Fetches the shard map that contains the coordinator's latest decision about moves, and
        ends the decided moves on this server. Retries until this succeeds or a newer decision
        arrives."""
        backoff = Backoff(first_s=0.05, longest_s=2.0)
        while self._decided is not None:
            decided = move, epoch = self._decided
            try:
                await self._layouts.at_least(epoch)
                await self._end_moves(move)
            except PreconditionError as error:
                logger.critical(
                    "the shard map does not match this server's partitions",
                    extra={"epoch": epoch, "reason": error.reason, "error": error},
                )
            except ShoalError as error:
                again_in_s = backoff.next_s(error)
                logger.warning(
                    "could not finish a move yet; will retry",
                    extra={"move": move, "error": error, "again_in_s": round(again_in_s, 3)},
                )
                await asyncio.sleep(again_in_s)
                continue
            if self._decided == decided:
                self._decided = None

    async def _end_moves(self, move: int) -> None:
        # The write of the move's record may still be in progress.
        is_open = await asyncio.shield(self._changes.in_order(lambda: self._moves.is_open(move)))
        # aborts streams before the record is written, so that no stream of the move continues after
        # it
        self._moves.settled = max(self._moves.settled, move)
        if not is_open:
            return  # already recorded; the coordinator repeats decisions
        stays = frozenset() if self._moves.leaving is None else self._moves.leaving.partitions
        await asyncio.shield(
            self._changes.move(settled_record(move), lambda: self._moves.settle(move))
        )
        self._giver.freed(stays)

    async def _give(self, order: MoveOrder) -> None:
        task = asyncio.create_task(self._hand_over(order))
        self._giving = (order.move, task)
        try:
            await asyncio.wait([task])
        finally:
            self._giving = None
            await end_tasks([task])

    async def _hand_over(self, order: MoveOrder) -> None:
        try:
            receiver = await self._giver.give(order)
        except NotTaken as error:
            self._not_given(order, error.error, giver_failed=False)
            return
        except ShoalError as error:
            self._not_given(order, error, giver_failed=True)
            return
        except Exception as error:  # without a report, the coordinator would wait forever
            logger.exception("could not hand over partitions")
            self._report(order.move, reason=f"{type(error).__name__}: {error}", giver_failed=True)
            return
        logger.info(
            "handed over partitions",
            extra={"move": order.move, "partitions": len(order.partition_ids)},
        )
        self._report(order.move, receiver=receiver)
        failpoint("move.reported")

    def _not_given(self, order: MoveOrder, error: ShoalError, *, giver_failed: bool) -> None:
        logger.warning(
            "could not hand over partitions",
            extra={"move": order.move, "reason": error.reason, "error": error},
        )
        self._report(order.move, reason=f"{error.reason}: {error}", giver_failed=giver_failed)
