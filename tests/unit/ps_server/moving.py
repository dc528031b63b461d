"""Two servers, one of which gives partitions to the other, without RPCs, and the state that each is
expected to have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from shoal_common.rpc.channel import ChannelSettings
from shoal_ps_server.configuration import Configuration
from shoal_ps_server.consistency.clocks import Clocks
from shoal_ps_server.consistency.fence import Fence
from shoal_ps_server.consistency.membership import Membership
from shoal_ps_server.metrics import Metrics
from shoal_ps_server.replication.transfer_sink import TransferSink
from shoal_ps_server.replication.transfer_source import TransferSource
from shoal_ps_server.service.layouts import Layouts
from shoal_ps_server.service.mover import Mover
from shoal_ps_server.session import MoveOrder, incarnation
from shoal_ps_server.shard.layout import Layout, PartitionSpec
from shoal_ps_server.shard.optimizer import optimizer_settings
from shoal_ps_server.shard.shard import Shard
from shoal_ps_server.storage.image import Members
from shoal_ps_server.storage.record import Record
from shoal_ps_server.storage.recovery import settled_record

from tests.unit.ps_server.journaled import ADAMW, JOB, Journaled, opened, same, state_of

ORDER = MoveOrder(
    move=1,
    partition_ids=frozenset({1, 3}),
    receiver_index=1,
    receiver_address="there:1",
    giver_incarnation=incarnation(),
)
MEMBERS = Members(generation=4, members=frozenset("abc"), evicted={"z": 2})


def specs(make: Any) -> tuple[PartitionSpec, ...]:
    return (
        make.spec(0),
        make.spec(1, offset=6),
        make.spec(3, length=4, dtype="bfloat16", tensor="bias"),
    )


def layout_of(make: Any, index: int, *, moved: bool) -> Layout:
    """Returns the shard map before the move (epoch 1) or after it (epoch 2) as seen by one of the
    two servers."""
    owners = {
        spec.partition_id: int(moved and spec.partition_id in ORDER.partition_ids)
        for spec in specs(make)
    }
    return Layout(
        epoch=2 if moved else 1,
        server_index=index,
        partitions={
            spec.partition_id: spec for spec in specs(make) if owners[spec.partition_id] == index
        },
        owners=owners,
        tensors=frozenset({"weight", "bias"}),
    )


class SourceWithoutNetwork(TransferSource):
    """Hands partitions over by calling `transfer`, which a test sets."""

    transfer: Callable[[MoveOrder, Callable[[], None]], Awaitable[str]] | None = None

    async def _transfer(self, order: MoveOrder, progress: Callable[[], None]) -> str:
        return await (self.transfer or super()._transfer)(order, progress)


class Moved:
    """A server that gives or receives partitions, with its journal, its giver and its receiver."""

    def __init__(self, server: Journaled, make: Any, index: int) -> None:
        self.server = server
        self.index = index
        self.make = make
        self.has_begun = False
        """True if this server has begun to send partitions."""
        self.membership = Membership(
            fence=Fence(), clocks=Clocks(), admission_wait=timedelta(seconds=0.01)
        )
        self.of_coordinator = layout_of(make, index, moved=False)
        self.layouts = Layouts(current=server.layout, fetch=self._fetch, adopt=self._adopt)
        self.receiver = TransferSink(
            job_id=JOB,
            shard=server.shard,
            moves=server.moves,
            membership=self.membership,
            changes=server.changes,
            layout_of=self.layouts.at_least,
            agree=self._agree,
        )
        self.giver = SourceWithoutNetwork(
            shard=server.shard,
            moves=server.moves,
            changes=server.changes,
            state=server._state,
            wake=self.membership.wake,
            channel=lambda address: ChannelSettings(address=address),
            metrics=Metrics(CollectorRegistry()),
        )

    async def know(self, members: Members = MEMBERS) -> None:
        self.membership.learn(members.generation, members.members)
        self.server.members = members
        self.server.changes.members_changed()
        await self.layouts.any()

    async def hand_over(self, receiver: Moved, order: MoveOrder = ORDER) -> None:
        """Hands partitions over as `give` does, but without a network."""
        self.sends_to(receiver)
        assert await self.giver.give(order) == "receiver"

    def sends_to(self, receiver: Moved) -> None:
        """Directs all later moves to `receiver`."""

        async def transfer(order: MoveOrder, progress: Callable[[], None]) -> str:
            self.has_begun = True
            await receiver.receiver.take(self.giver._chunks(order, progress))
            return "receiver"

        self.giver.transfer = transfer

    async def settle(self, *, moved: bool, move: int = 1) -> None:
        self.of_coordinator = layout_of(self.make, self.index, moved=moved)
        await self.layouts.at_least(self.of_coordinator.epoch)
        await self.server.changes.move(settled_record(move), lambda: self.server.moves.settle(move))

    async def _fetch(self) -> Layout:
        return self.of_coordinator

    async def _adopt(self, layout: Layout) -> None:
        before, moves = self.layouts.current, self.server.moves
        moves.check(layout, before=before)

        def effect() -> None:
            moves.adopt(
                layout,
                before=before,
                members=self.membership.fence.members | self.membership.fence.evicted.keys(),
            )
            self.server.layout = layout
            self.layouts.becomes(layout)

        await self.server.changes.adopt(layout, effect)

    async def _agree(self, given: Configuration) -> Configuration:
        if self.server.configuration is None:

            def effect() -> None:
                self.server.configuration = given
                self.server.shard.configure(given.optimizer)

            await self.server.changes.configure(given, effect)
        else:
            self.server.configuration.check_equal(given.configured, given.consistency)
        assert self.server.configuration is not None
        return self.server.configuration


class History:
    """Records the state at each version of a server that applies the same pushes and gives no
    partition away."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self.whole = Shard(optimizer=optimizer_settings(name="adamw", hyperparameters=ADAMW))
        self.whole.adopt(make.layout(*specs(make)))
        self._images: dict[int, dict[int, Any]] = {spec.partition_id: {} for spec in specs(make)}

    def upload(self, spec: PartitionSpec, sequence: int) -> Any:
        values = torch.arange(spec.length) - sequence if sequence else torch.arange(spec.length)
        return self._make.upload(
            values,
            spec,
            sequence=sequence,
            base_version=min(sequence, 1),
            batch=100 + sequence if sequence else 0,
        )

    async def push(self, server: Journaled, sequence: int, partition_ids: Any = (0, 1, 3)) -> None:
        """Pushes to `server` and to this record. Sequence number 0 initializes the values."""
        for spec in specs(self._make):
            number = spec.partition_id
            if number in partition_ids:
                await (server.push if sequence else server.initialize)(self.upload(spec, sequence))
                (self.whole.push if sequence else self.whole.initialize)(
                    self.upload(spec, sequence)
                )
                self._images[number][self.whole.version(number)] = self.whole.image(number)

    def has(self, shard: Shard) -> bool:
        """Returns whether each partition in the shard that has values has the recorded values of
        its version."""
        found = {number: image for number, image in state_of(shard).items() if image is not None}
        return same(
            found, {number: self._images[number][image.version] for number, image in found.items()}
        )


@asynccontextmanager
async def two(tmp_path: Path, make: Any) -> AsyncIterator[tuple[Moved, Moved, History]]:
    """Yields a giver with values and AdamW's state, an empty receiver, and the record of expected
    states."""
    async with AsyncExitStack() as stack:
        giver, receiver = [
            Moved(await stack.enter_async_context(opened(tmp_path / name)), make, index)
            for index, name in enumerate(("giver", "receiver"))
        ]
        history = History(make)
        await receiver.know(Members(generation=4, members=frozenset("abc")))
        await giver.know()
        await giver.server.configure(optimizer_settings(name="adamw", hyperparameters=ADAMW))
        for sequence in range(3):
            await history.push(giver.server, sequence)
        yield giver, receiver, history


class ReportRecorder:
    """Records the giver's reports to the coordinator."""

    def __init__(self, moved: Moved) -> None:
        self.reports: list[tuple[int, str, str]] = []
        self.mover = Mover(
            moves=moved.server.moves,
            giver=moved.giver,
            layouts=moved.layouts,
            changes=moved.server.changes,
            report=self._report,
        )

    def _report(
        self, move: int, *, receiver: str = "", reason: str = "", giver_failed: bool = False
    ) -> None:
        self.reports.append((move, receiver, reason))
        self.blames_itself = giver_failed

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Mover]:
        task = asyncio.create_task(self.mover.run())
        try:
            yield self.mover
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


class SilentFollower:
    """A follower of a journal that records the kinds of records and confirms none."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def made(self, record: Record) -> None:
        raise AssertionError

    def written(self, record: Record) -> int:
        self.heard.append(record.kind)
        return len(self.heard)
