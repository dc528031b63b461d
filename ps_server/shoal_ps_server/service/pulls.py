"""Pull: waits for slower members and for first values, then reads partitions off the shard, one ahead of what is being sent.

Belongs to the event loop. A partition is encoded in one go on the shard's thread, which makes it consistent with one copy; a slow reader
holds at most two partitions in memory and no lock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from datetime import timedelta

from shoal_common.errors import DeadlineError
from shoal_common.wire import checksum, encode_pull_chunk, framed
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_ps_server.consistency.clocks import ConsistencyMode
from shoal_ps_server.consistency.membership import Membership
from shoal_ps_server.service.requests import Pull, Wanted
from shoal_ps_server.shard.layout import PartitionSpec
from shoal_ps_server.shard.payload import describe
from shoal_ps_server.shard.worker import ShardWorker


class Pulls:
    """What all pulls of a server share."""

    def __init__(self, *, shard: ShardWorker, membership: Membership, waited: Callable[[float], None]) -> None:
        """`waited` is told the seconds of every wait for slower members, also of those that took none."""
        self._shard = shard
        self._membership = membership
        self._waited = waited
        self._first_values: dict[int, asyncio.Event] = {}

    def initialized(self, partition_id: int) -> None:
        """A partition has its first values: wakes the pulls that wait for them."""
        if event := self._first_values.pop(partition_id, None):
            event.set()

    async def serve(self, pull: Pull) -> AsyncGenerator[tuple[int, list[bytes]]]:
        """For each partition its version and the PullChunks that carry it, encoded; the version is 0 where nothing newer was there.

        Raises what the .proto says of Pull.
        """
        deadline = time.monotonic() + pull.wait.total_seconds()
        if pull.member_id:
            await self._membership.admit(pull.member_id, pull.generation)
            await self._await_turn(pull)
        ahead: asyncio.Task[tuple[int, list[bytes]]] | None = None
        try:
            for wanted in pull.partitions:
                current, ahead = ahead, asyncio.create_task(self._read(wanted, deadline))
                if current is not None:
                    yield await current
            if ahead is not None:
                yield await ahead
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    async def _await_turn(self, pull: Pull) -> None:
        """ssp: the member says how far it is, and may have to wait for those behind."""
        self._membership.finished(pull.member_id, pull.clock)
        started = time.monotonic()
        try:
            await self._membership.proceed(pull.member_id, pull.generation, wait=pull.wait)
        finally:
            if self._membership.consistency.mode is ConsistencyMode.SSP:
                self._waited(time.monotonic() - started)

    async def _read(self, wanted: Wanted, deadline: float) -> tuple[int, list[bytes]]:
        """One partition, encoded; waits for its first values. Raises DeadlineError / PARTITION_UNINITIALIZED."""
        partition_id = wanted.spec.partition_id
        while True:
            # Taken before the look at the shard, so that values which come in between are not missed.
            first_values = self._first_values.setdefault(partition_id, asyncio.Event())
            version, chunks = await self._shard.submit(
                lambda shard: shard.read(partition_id, newer_than=wanted.newer_than, encode=_encoded)
            )
            if version:
                self.initialized(partition_id)
            if chunks is not None:
                return version, chunks
            if version:
                unchanged = pb.PullHeader(partition_id=partition_id, version=version, unchanged=True)
                return 0, [encode_pull_chunk((unchanged, memoryview(b"")))]
            await _wait_for(first_values, wanted.spec, deadline)


def _encoded(spec: PartitionSpec, version: int, values: memoryview) -> list[bytes]:
    """On the shard's thread, while the values stand still."""
    header = pb.PullHeader(
        partition_id=spec.partition_id,
        version=version,
        dtype=spec.element.wire,
        codec=pb.CODEC_RAW,
        length=spec.length,
        payload_bytes=values.nbytes,
        checksum=checksum(values),
    )
    return [encode_pull_chunk(chunk) for chunk in framed(header, values)]


async def _wait_for(first_values: asyncio.Event, spec: PartitionSpec, deadline: float) -> None:
    wait = timedelta(seconds=max(0.0, deadline - time.monotonic()))
    try:
        async with asyncio.timeout(wait.total_seconds()):
            await first_values.wait()
    except TimeoutError as error:
        raise DeadlineError(
            f"{describe(spec)} has no values yet: nobody sent Initialize, or not to this server; wait longer (wait_ms)",
            reason="PARTITION_UNINITIALIZED",
        ) from error
