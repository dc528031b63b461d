"""Receiver's side of a move: writes another server's partitions to the journal, where they stay
until a shard map assigns them to this server. Belongs to the event loop.

A receiver without values of trained tensors takes over the giver's clocks, so that members continue
at the iteration that they have reached and do not wait for resting members. A receiver with trained
tensors keeps its own clocks, since members report to it; a server with only frozen tensors does not
receive reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from shoal_common.errors import (
    CorruptDataError,
    DeadlineError,
    InvalidRequestError,
    LimitError,
    PreconditionError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_common.failpoints import failpoint

from shoal_ps_server.configuration import Configuration
from shoal_ps_server.consistency.membership import Membership
from shoal_ps_server.replication.items import (
    FORMAT_VERSION,
    PARTITION,
    STATE,
    WHOLE,
    Item,
    received_items,
)
from shoal_ps_server.shard.layout import Layout
from shoal_ps_server.shard.partition import PartitionImage
from shoal_ps_server.shard.shard import Shard
from shoal_ps_server.storage.changes import Changes
from shoal_ps_server.storage.image import Members, configuration_from_json, members_from_json
from shoal_ps_server.storage.moves import Moves
from shoal_ps_server.storage.recovery import coming_image, coming_record, taken_record

_STREAM_LIMIT: Final = timedelta(seconds=30)
"""Maximum duration of a stream. It exceeds the giver's own limit."""


@dataclass(frozen=True, kw_only=True)
class _Offer:
    """A giver's first item, which describes the move."""

    job_id: str
    move: int
    epoch: int
    """Epoch of the giver's shard map."""
    partitions: frozenset[int]
    configuration: Configuration | None
    members: Members
    batches: tuple[tuple[int, int], ...]


class TransferSink:
    """Receiver's side of all moves of partitions to one server."""

    def __init__(
        self,
        *,
        job_id: str,
        shard: Shard,
        moves: Moves,
        membership: Membership,
        changes: Changes,
        layout_of: Callable[[int, bool], Awaitable[Layout]],
        agree: Callable[[Configuration], Awaitable[Configuration]],
    ) -> None:
        """Prepares a server to receive partitions.

        Args:
            job_id: id of the job.
            shard, moves, membership, changes: state of the server.
            layout_of: returns the shard map of the given epoch or a newer one; if the second
                argument is True, the coordinator's current shard map.
            agree: reconciles this server's configuration with the giver's configuration, and
                returns the result. Raises PreconditionError / OPTIMIZER_CONFLICT.
        """
        self._job_id = job_id
        self._shard = shard
        self._moves = moves
        self._membership = membership
        self._changes = changes
        self._layout_of = layout_of
        self._agree = agree
        self._newest: object = None
        """The last opened stream. Earlier streams are aborted."""

    async def take(self, messages: AsyncIterator[bytes]) -> None:
        """Receives the partitions that a giver sends on one TakePartitions stream. Raises the
        errors documented in the .proto."""
        stream = self._newest = object()
        limit_s = _STREAM_LIMIT.total_seconds()
        try:
            async with (
                asyncio.timeout(limit_s) as limit,
                aclosing(received_items(messages)) as items,
            ):
                offer = _offer(await anext(items, Item(kind=WHOLE)))
                configuration, layout = await self._check(offer)
                await self._take_all(offer, configuration, layout, items, stream)
        except CorruptDataError as error:
            # this is a request, so invalid contents are the giver's fault
            raise InvalidRequestError(str(error), reason=error.reason) from error
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineError(
                f"the stream did not end within {limit_s:g} s", reason="STREAM_IDLE"
            ) from error

    async def _check(self, offer: _Offer) -> tuple[Configuration | None, Layout]:
        """Checks that this server can receive the partitions, and adopts the giver's configuration
        and its information about the job."""
        if offer.job_id != self._job_id:
            raise UnknownResourceError(
                f"this server holds job {self._job_id!r}, but the stream is for job "
                f"{offer.job_id!r}",
                reason="JOB_UNKNOWN",
            )
        if not offer.partitions:
            raise _malformed("its first item contains no partitions")
        self._check_open(offer)
        # A newer move means that the coordinator has decided on the earlier moves. The partitions
        # that this server got from them must be known first.
        before = self._moves.taken
        layout = await self._layout_of(
            offer.epoch, before is not None and before.move != offer.move
        )
        self._check_not_held(offer)
        # Otherwise a member that the giver has recorded as evicted could continue on this server.
        await self._membership.know(offer.members.generation)
        return None if offer.configuration is None else await self._agree(
            offer.configuration
        ), layout

    def _check_open(self, offer: _Offer) -> None:
        newest = max(
            (each.move for each in (self._moves.taken, self._moves.coming) if each is not None),
            default=0,
        )
        if offer.move <= self._moves.settled or offer.move < newest:
            raise PreconditionError(
                f"move {offer.move} is over; the newest move known to this server is "
                f"{max(self._moves.settled, newest)}",
                reason="MOVE_SETTLED",
            )

    async def _take_all(
        self,
        offer: _Offer,
        configuration: Configuration | None,
        layout: Layout,
        items: AsyncIterator[Item],
        stream: object,
    ) -> None:
        came: dict[int, asyncio.Future[None]] = {}
        async for item in items:
            if item.kind == WHOLE:
                break
            image = await self._image(item, configuration)
            if image.spec.partition_id not in offer.partitions:
                raise _malformed(
                    f"partition {image.spec.partition_id} does not belong to this move"
                )
            self._check_stream(offer, stream)
            came[image.spec.partition_id] = self._changes.move(
                coming_record(offer.move, item.fields, item.payload),
                _bring(self._moves, offer.move, image),
            )
        else:
            raise _malformed("it ended before its last item")
        if missing := offer.partitions - came.keys():
            raise _malformed(f"partition {min(missing)} is missing")
        self._check_stream(offer, stream)
        for written in came.values():
            if written.done():
                # raises if the configuration was refused, since the following records depend on it
                written.result()
        is_fresh = not self._shard.is_trained(layout.frozen)
        self._membership.take_over(
            offer.members.fence(), offer.members.restored_clocks() if is_fresh else None
        )
        self._changes.members_changed()  # the next record is written after the changed members
        done = self._changes.move(
            taken_record(offer.move, sorted(came), offer.batches),
            lambda: self._moves.take(offer.move, sorted(came), offer.batches),
        )
        await self._changes.in_time(lambda: asyncio.shield(done))
        # raises if the move was closed in the meantime and nothing was taken over
        self._check_open(offer)
        failpoint("move.taken")

    def _check_stream(self, offer: _Offer, stream: object) -> None:
        if stream is not self._newest:
            raise UnavailableError(
                "the server that is handing over the partitions has opened a newer stream",
                reason="SESSION_REPLACED",
            )
        self._check_open(offer)  # the coordinator may have decided in the meantime
        self._check_not_held(offer)

    def _check_not_held(self, offer: _Offer) -> None:
        if held := offer.partitions.intersection(self._shard.partition_ids()):
            raise PreconditionError(
                f"move {offer.move}: this server already has partition {min(held)}",
                reason="LAYOUT_CONFLICT",
            )

    async def _image(self, item: Item, configuration: Configuration | None) -> PartitionImage:
        if item.kind != PARTITION:
            raise _malformed(f"unexpected item of kind {item.kind}")
        optimizer = None if configuration is None else configuration.optimizer
        try:
            return await asyncio.to_thread(coming_image, item.fields, item.payload, optimizer)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _malformed(f"{type(error).__name__}: {error}") from error
        except (MemoryError, RuntimeError) as error:
            raise LimitError(
                f"not enough memory for {item.payload.nbytes} bytes of partitions from another "
                f"server: {error}; give this server more memory",
                reason="MEMORY_EXHAUSTED",
            ) from error


def _bring(moves: Moves, move: int, image: PartitionImage) -> Callable[[], None]:
    return lambda: moves.bring(move, image)


def _offer(item: Item) -> _Offer:
    """Parses the first item of a giver. Raises CorruptDataError / STREAM_MALFORMED, and
    PreconditionError / FORMAT_UNSUPPORTED."""
    if item.kind != STATE:
        raise _malformed("its first item is not of kind KIND_STATE")
    fields: Any = item.fields
    try:
        if (found := fields["format"]) != FORMAT_VERSION:
            raise PreconditionError(
                f"format={found}: this server's release uses {FORMAT_VERSION}; run servers that "
                "exchange partitions with the same release",
                reason="FORMAT_UNSUPPORTED",
            )
        return _Offer(
            job_id=str(fields["job_id"]),
            move=int(fields["move"]),
            epoch=int(fields["epoch"]),
            partitions=frozenset(map(int, fields["partitions"])),
            configuration=None
            if fields["configuration"] is None
            else configuration_from_json(fields["configuration"]),
            members=members_from_json(fields["members"]),
            batches=tuple((int(first), int(end)) for first, end in fields["batches"]),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _malformed(f"{type(error).__name__}: {error}") from error


def _malformed(what: str) -> CorruptDataError:
    return CorruptDataError(f"invalid stream from the giver: {what}", reason="STREAM_MALFORMED")
