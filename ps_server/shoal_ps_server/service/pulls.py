"""Implements Pull: waits for slower members and for first values, then returns the partitions one
after another.

Belongs to the event loop. A partition is read with copy-on-write (shard/reading.py), so a pull
returns consistent values without a lock, even to a slow reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager

from shoal_common.errors import DeadlineError, UnavailableError
from shoal_common.formats import codecs
from shoal_common.formats.wire import checksum
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_ps_server.consistency.clocks import ConsistencyMode
from shoal_ps_server.consistency.membership import Membership
from shoal_ps_server.service.requests import Pull, Wanted
from shoal_ps_server.shard.layout import PartitionSpec
from shoal_ps_server.shard.payload import describe
from shoal_ps_server.shard.reading import Reading
from shoal_ps_server.shard.shard import Shard


class Pulls:
    """Serves all pulls of a server."""

    def __init__(
        self,
        *,
        shard: Shard,
        membership: Membership,
        quiet: Callable[[], Awaitable[None]],
        waited: Callable[[float], None],
        answered: Callable[[int | None], None],
    ) -> None:
        """Prepares a server for pulls.

        Args:
            shard, membership: state of the server.
            quiet: waits until no changes are pending.
            waited: called with the duration in seconds of each wait for slower members, even if it
                is zero.
            answered: called for each partition with the number of bytes of values sent, or None if
                the partition was unchanged.
        """
        self._shard = shard
        self._membership = membership
        self._quiet = quiet
        self._waited = waited
        self._answered = answered
        self._first_values: dict[int, asyncio.Event] = {}
        self._stopping = False

    def initialized(self, partition_id: int) -> None:
        """Wakes the pulls that are waiting for the first values of a partition."""
        if event := self._first_values.pop(partition_id, None):
            event.set()

    def stop(self) -> None:
        """Stops the server's pulls. Pulls that are waiting for first values fail with
        UnavailableError / SERVER_STOPPING."""
        self._stopping = True
        for partition_id in list(self._first_values):
            self.initialized(partition_id)

    async def serve(
        self, pull: Pull, *, key: str = ""
    ) -> AsyncGenerator[tuple[pb.PullHeader, Reading | None]]:
        """Yields the header and the values of each partition; instead of values, yields None for an
        unchanged partition. The values must be read before the next partition is requested. `key`:
        key presented by the caller.

        Raises the errors documented for Pull in the .proto.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + pull.wait.total_seconds()

        def check() -> None:
            for wanted in pull.partitions:
                self._shard.check_open(wanted.spec)

        check()
        if pull.member_id:
            await self._membership.admit(pull.member_id, pull.generation, key=key)
            await self._await_turn(pull, check)
        for wanted in pull.partitions:
            await self._await_values(wanted.spec, deadline)
            version = self._shard.version(wanted.spec.partition_id)
            if version <= wanted.newer_than:
                self._note(pull, wanted.spec)
                yield (
                    pb.PullHeader(
                        partition_id=wanted.spec.partition_id, version=version, unchanged=True
                    ),
                    None,
                )
                self._answered(None)
            else:
                codec = _codec(wanted.spec, pull.codec)
                with self._reading(wanted, codec) as reading:
                    self._note(pull, wanted.spec)
                    header = _header(wanted, codec, reading, checksummed=pull.checksums)
                    yield header, reading
                self._answered(header.payload_bytes)

    @contextmanager
    def _reading(self, wanted: Wanted, codec: int) -> Iterator[Reading]:
        if wanted.ids is None:
            with self._shard.reading(wanted.spec.partition_id, codec) as reading:
                yield reading
        else:
            yield self._shard.read_rows(wanted.spec.partition_id, wanted.ids)

    def _note(self, pull: Pull, spec: PartitionSpec) -> None:
        """Records the version that a member has pulled, because the member will compute its next
        push from these values. Ignores a member that has been evicted since it sent the pull."""
        if (
            spec.bucket is None
            and pull.member_id
            and pull.member_id in self._membership.fence.members
        ):
            self._shard.note_pull(spec.partition_id, pull.member_id)

    async def _await_turn(self, pull: Pull, check: Callable[[], None]) -> None:
        """Reports the member's progress and, under ssp and bsp, waits for slower members. Under
        bsp, then also waits until no changes are pending."""
        self._membership.finished(pull.member_id, pull.clock)
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            await self._membership.proceed(
                pull.member_id, pull.generation, wait=pull.wait, check=check
            )
            if self._membership.consistency.mode is ConsistencyMode.BSP:
                # needed for a member that has left, because no other member waits for it: all
                # readers must see its last push, or none may
                await self._quiet()
        finally:
            if self._membership.consistency.mode is not ConsistencyMode.ASP:
                self._waited(loop.time() - started)

    async def _await_values(self, spec: PartitionSpec, deadline: float) -> None:
        """Waits until a partition has values. Raises DeadlineError / PARTITION_UNINITIALIZED, and
        the errors of `Shard.check_open`."""
        self._shard.check_open(spec)
        try:
            async with asyncio.timeout_at(deadline):
                while not self._shard.version(spec.partition_id):
                    if self._stopping:
                        raise UnavailableError(
                            "this server is stopping; try again", reason="SERVER_STOPPING"
                        )
                    await self._first_values.setdefault(spec.partition_id, asyncio.Event()).wait()
                    self._shard.check_open(spec)
        except TimeoutError as error:
            raise DeadlineError(
                f"{describe(spec)} has no values yet; send Initialize to this server, or wait "
                "longer (wait_ms)",
                reason="PARTITION_UNINITIALIZED",
            ) from error


def _codec(spec: PartitionSpec, asked: int) -> int:
    """Returns the requested codec if it makes the values smaller, otherwise RAW. Rows are never
    compressed."""
    return (
        asked
        if asked != codecs.RAW
        and spec.bucket is None
        and codecs.payload_bytes(asked, spec.length) < spec.nbytes
        else codecs.RAW
    )


def _header(wanted: Wanted, codec: int, reading: Reading, *, checksummed: bool) -> pb.PullHeader:
    spec = wanted.spec
    return pb.PullHeader(
        partition_id=spec.partition_id,
        version=reading.version,
        dtype=spec.element.wire,
        codec=pb.Codec.ValueType(codec),
        length=spec.length if wanted.ids is None else reading.remaining // spec.element.itemsize,
        payload_bytes=reading.remaining,
        checksum=checksum(reading.rest) if checksummed else 0,
    )
