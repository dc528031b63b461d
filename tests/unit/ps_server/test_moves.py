"""Partitions on their way between servers: whatever is killed, copied or refused meanwhile, one of them has all of it, to the last bit."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from prometheus_client import CollectorRegistry
from shoal_common.errors import InvalidRequestError, PreconditionError, ShoalError, UnavailableError, UnknownResourceError
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_ps_server.configuration import Configuration
from shoal_ps_server.consistency.clocks import Clocks, Consistency, ConsistencyMode
from shoal_ps_server.consistency.fence import Fence
from shoal_ps_server.consistency.membership import Membership
from shoal_ps_server.metrics import Metrics
from shoal_ps_server.replication.giving import Giver, NotTaken
from shoal_ps_server.replication.items import FORMAT_VERSION, PARTITION, RECORD, STATE, WHOLE, received_items
from shoal_ps_server.replication.primary import Backup
from shoal_ps_server.replication.taking import Receiver
from shoal_ps_server.service.layouts import Layouts
from shoal_ps_server.service.mover import Mover
from shoal_ps_server.session import MoveOrder, Place, incarnation
from shoal_ps_server.shard.batches import Batches
from shoal_ps_server.shard.layout import Layout, PartitionSpec, layout_from_shard_map
from shoal_ps_server.shard.optimizer import optimizer_settings
from shoal_ps_server.shard.shard import Shard
from shoal_ps_server.storage.directory import DataDirectory
from shoal_ps_server.storage.image import Members, ServerImage, layout_from_json, layout_to_json, state_from_json
from shoal_ps_server.storage.moves import Moves
from shoal_ps_server.storage.record import Record, read_all
from shoal_ps_server.storage.recovery import LEAVING, PUSH, SETTLED, TAKEN, Recovered, Replay, settled_record
from shoal_ps_server.storage.snapshot import partition_from_bytes

from tests.unit.ps_server.journaled import ADAMW, JOB, SERVER, Journaled, file, largest_file, opened, run, same, state_of

ORDER = MoveOrder(move=1, partition_ids=frozenset({1, 3}), receiver_index=1, receiver_address="there:1", giver_incarnation=incarnation())
MEMBERS = Members(generation=4, members=frozenset("abc"), put_out={"z": 2})


def specs(make: Any) -> tuple[PartitionSpec, ...]:
    return make.spec(0), make.spec(1, offset=6), make.spec(3, length=4, dtype="bfloat16", tensor="bias")


def layout_of(make: Any, index: int, *, moved: bool) -> Layout:
    """The map before the move (epoch 1), or after it (epoch 2), as one of the two servers sees it."""
    owners = {spec.partition_id: int(moved and spec.partition_id in ORDER.partition_ids) for spec in specs(make)}
    return Layout(
        epoch=2 if moved else 1,
        server_index=index,
        partitions={spec.partition_id: spec for spec in specs(make) if owners[spec.partition_id] == index},
        owners=owners,
        tensors=frozenset({"weight", "bias"}),
    )


class GiverWithoutNetwork(Giver):
    """Hands partitions over by `transfer`, where a test has set it."""

    transfer: Callable[[MoveOrder, Callable[[], None]], Awaitable[str]] | None = None

    async def _transfer(self, order: MoveOrder, progress: Callable[[], None]) -> str:
        return await (self.transfer or super()._transfer)(order, progress)


class Moved:
    """A server of which partitions move: its journal, and what gives and takes."""

    def __init__(self, server: Journaled, make: Any, index: int) -> None:
        self.server = server
        self.index = index
        self.make = make
        self.has_begun = False
        """To send."""
        self.membership = Membership(fence=Fence(), clocks=Clocks(), admission_wait=timedelta(seconds=0.01))
        self.of_coordinator = layout_of(make, index, moved=False)
        self.layouts = Layouts(current=server.layout, fetch=self._fetch, adopt=self._adopt)
        self.receiver = Receiver(
            job_id=JOB,
            shard=server.shard,
            moves=server.moves,
            membership=self.membership,
            changes=server.changes,
            layout_of=self.layouts.at_least,
            agree=self._agree,
        )
        self.giver = GiverWithoutNetwork(
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
        """As `give` does, without a network."""
        self.gives_to(receiver)
        assert await self.giver.give(order) == "receiver"

    def gives_to(self, receiver: Moved) -> None:
        """What it gives from now on goes to `receiver`."""

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
            moves.adopt(layout, before=before, members=self.membership.fence.members | self.membership.fence.put_out.keys())
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
    """What one server has at each version, that does the same and gives nothing away."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self.whole = Shard(optimizer=optimizer_settings(name="adamw", hyperparameters=ADAMW))
        self.whole.adopt(make.layout(*specs(make)))
        self._images: dict[int, dict[int, Any]] = {spec.partition_id: {} for spec in specs(make)}

    def upload(self, spec: PartitionSpec, sequence: int) -> Any:
        values = torch.arange(spec.length) - sequence if sequence else torch.arange(spec.length)
        return self._make.upload(values, spec, sequence=sequence, base_version=min(sequence, 1), batch=100 + sequence if sequence else 0)

    async def push(self, server: Journaled, sequence: int, partition_ids: Any = (0, 1, 3)) -> None:
        """To a server, and here. Number 0 are the first values."""
        for spec in specs(self._make):
            number = spec.partition_id
            if number in partition_ids:
                await (server.push if sequence else server.initialize)(self.upload(spec, sequence))
                (self.whole.push if sequence else self.whole.initialize)(self.upload(spec, sequence))
                self._images[number][self.whole.version(number)] = self.whole.image(number)

    def has(self, shard: Shard) -> bool:
        """Whether each partition of a shard that has values has those of its version."""
        found = {number: image for number, image in state_of(shard).items() if image is not None}
        return same(found, {number: self._images[number][image.version] for number, image in found.items()})


@asynccontextmanager
async def two(tmp_path: Path, make: Any) -> AsyncIterator[tuple[Moved, Moved, History]]:
    """The giver, which has values and AdamW's state, the receiver, which has nothing, and what is to be."""
    async with AsyncExitStack() as stack:
        giver, receiver = [
            Moved(await stack.enter_async_context(opened(tmp_path / name)), make, index) for index, name in enumerate(("giver", "receiver"))
        ]
        history = History(make)
        await receiver.know(Members(generation=4, members=frozenset("abc")))
        await giver.know()
        await giver.server.configure(optimizer_settings(name="adamw", hyperparameters=ADAMW))
        for sequence in range(3):
            await history.push(giver.server, sequence)
        yield giver, receiver, history


def cuts(path: Path, tmp_path: Path) -> list[tuple[int, Recovered]]:
    """What a server recovers that was killed after any of its journal's records, and how many they were."""
    data = memoryview(file(path).read_bytes())
    journal_id = int((path / "journal.id").read_text(), 16)
    found = []
    for count, record in enumerate(read_all(data, journal_id, 1)):
        cut = tmp_path / f"{path.name}-{count}"
        shutil.copytree(path, cut)
        with file(cut).open("r+b") as journal:
            journal.truncate(record.end)
        with DataDirectory(cut) as directory:
            found.append((count, directory.recover(job_id=JOB, server_id=SERVER)))
        shutil.rmtree(cut)
    return found


def told(recovered: Recovered, make: Any, index: int, *, moved: bool) -> Shard:
    """A recovered server hears how the move ended."""
    layout = layout_of(make, index, moved=moved)
    members = recovered.members.members | recovered.members.put_out.keys()
    recovered.moves.adopt(layout, before=recovered.layout, members=members)
    recovered.moves.settle(1)
    return recovered.shard


@pytest.mark.parametrize("moved", [True, False])
def test_a_crash_between_any_two_records_leaves_one_owner_with_all_that_was_acknowledged(make, tmp_path, moved) -> None:
    async def test() -> History:
        async with two(tmp_path, make) as (giver, receiver, history):
            await giver.hand_over(receiver)
            for server in (giver, receiver):
                await server.settle(moved=moved)
            owner = receiver if moved else giver
            await history.push(owner.server, 3, ORDER.partition_ids)
            await history.push(giver.server, 3, {0})
            assert (await owner.server.push(history.upload(make.spec(1, offset=6), 3))).duplicate
            return history

    history = run(test())
    kept = {0: 0, 1: 0}
    for index, name in enumerate(("giver", "receiver")):
        for _, recovered in cuts(tmp_path / name, tmp_path):
            moves = recovered.moves
            assert history.has(recovered.shard)
            noted = (
                moves.leaving is not None or moves.taken is not None or moves.settled or (recovered.layout and recovered.layout.epoch > 1)
            )
            if moves.leaving is not None:
                assert recovered.shard.frozen == ORDER.partition_ids
                with pytest.raises(UnavailableError, match="is moving"):
                    recovered.shard.push(history.upload(make.spec(1, offset=6), 3))
            if not noted and moved:
                continue  # the coordinator has decided on nothing yet
            kept[index] += 1
            shard = told(recovered, make, index, moved=moved)
            assert not shard.frozen
            assert history.has(shard)
            if index == 1 or noted:
                mine = ORDER.partition_ids if index == 1 else {0} if moved else {0, 1, 3}
                assert set(shard.partition_ids()) == (mine if moved or index == 0 else set())
                assert all(shard.version(number) >= 3 for number in shard.partition_ids())
    assert min(kept.values()) > 3


Step = Callable[[], Awaitable[object]]


async def steps(giver: Moved, receiver: Moved, history: History) -> list[Step]:
    """A move there and one back, with pushes in between."""
    back = replace(ORDER, move=2, partition_ids=frozenset({3}), receiver_index=0)

    async def settle_back() -> None:
        for server in (giver, receiver):
            layout = layout_of(server.make, server.index, moved=True)
            owners = {**layout.owners, 3: 0}
            partitions = {spec.partition_id: spec for spec in specs(server.make) if owners[spec.partition_id] == server.index}
            server.of_coordinator = replace(layout, epoch=3, owners=owners, partitions=partitions)
            await server.layouts.at_least(3)
            await server.server.changes.move(settled_record(2), lambda server=server: server.server.moves.settle(2))

    return [
        lambda: giver.hand_over(receiver),
        lambda: history.push(giver.server, 3, {0}),
        lambda: receiver.settle(moved=True),
        lambda: history.push(receiver.server, 3, {1, 3}),
        lambda: giver.settle(moved=True),
        lambda: receiver.hand_over(giver, back),
        lambda: history.push(receiver.server, 4, {1}),
        settle_back,
        lambda: history.push(giver.server, 4, {0, 3}),
    ]


@pytest.mark.parametrize("at", range(9))
def test_snapshots_that_are_taken_while_partitions_move_have_all_of_them(make, tmp_path, at) -> None:
    """Each begins with one of the steps, and its partitions are copied during that and the next ones."""

    async def test() -> tuple[list[dict[int, Any]], History]:
        async with two(tmp_path, make) as (giver, receiver, history):
            snapshots = []
            for number, step in enumerate(await steps(giver, receiver, history)):
                if number == at:
                    snapshots = [asyncio.create_task(each.server.snapshots.write()) for each in (giver, receiver)]
                await step()
            await asyncio.gather(*snapshots)
            return [state_of(each.server.shard) for each in (giver, receiver)], history

    states, history = run(test())
    for name, state in zip(("giver", "receiver"), states, strict=True):
        with DataDirectory(tmp_path / name) as directory:
            recovered = directory.recover(job_id=JOB, server_id=SERVER)
        assert same(state_of(recovered.shard), state)
        assert history.has(recovered.shard)
        assert {number: image.version for number, image in state.items()} == ({0: 5, 3: 5} if name == "giver" else {1: 5})


@pytest.mark.parametrize("at", range(9))
def test_a_backup_that_begins_to_follow_while_partitions_move_has_what_its_primary_has(make, tmp_path, at) -> None:
    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, history):
            followers: list[Follower] = []
            for number, step in enumerate(await steps(giver, receiver, history)):
                if number == at:
                    followers = [Follower(each.server) for each in (giver, receiver)]
                    await asyncio.sleep(0)
                await step()
                for each in (giver, receiver):
                    await each.server.journal.append(None, lambda: None)
                for follower, each in zip(followers, (giver, receiver), strict=False):
                    await follower.caught_up(each.server)
            for follower in followers:
                await follower.close()

    run(test())


def test_a_partition_that_goes_and_comes_back_before_a_backup_has_got_it_is_there_with_all_its_pushes(make, tmp_path, monkeypatch) -> None:
    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, history), asyncio.timeout(20):
            go, follower = asyncio.Event(), Follower(giver.server)
            wait = follower._backup._until

            async def later(*arguments: Any) -> None:
                await go.wait()
                await wait(*arguments)

            monkeypatch.setattr(follower._backup, "_until", later)
            await until(lambda: giver.server.journal._follower is not None)  # it gets partition 0, and the others when it may go on
            for step in await steps(giver, receiver, history):
                await step()
            go.set()
            await follower.caught_up(giver.server)
            await follower.close()

    run(test())


class Follower:
    """A backup without a disk."""

    def __init__(self, server: Journaled) -> None:
        self._requests: asyncio.Queue[pb.FollowRequest] = asyncio.Queue()
        self._backup = Backup(
            shard=server.shard,
            moves=server.moves,
            state=server._state,
            report=lambda *_: None,
            metrics=Metrics(CollectorRegistry()),
            noted="",
            patience=timedelta(seconds=30),
        )
        self._backup.write_to(server.journal)
        self._backup.placed(Place(epoch=1, follows=False, primary_address="", backup_id="b", in_sync=False))
        self._task = asyncio.create_task(self._follow())
        self._replay: Replay | None = None

    async def _follow(self) -> None:
        begin = pb.FollowBegin(job_id=JOB, server_id="b", epoch=1, format=FORMAT_VERSION)
        state: Any = None
        images: list[Any] = []
        records: list[Any] = []
        async for item in received_items(self._backup.serve(begin, self._sent())):
            if item.kind == STATE:
                state = state_from_json(json.loads(bytes(item.payload)))
            elif item.kind == PARTITION:
                spec = state.layout.partitions[item.fields["partition_id"]]
                images.append(partition_from_bytes(item.fields, item.payload, spec, state.configuration.optimizer))
            elif item.kind == WHOLE:
                self._replay = Replay(ServerImage(state=state, partitions=tuple(images)))
            elif item.kind == RECORD:
                records.append(item)
            if self._replay is not None:
                for each in records:
                    self._replay.make(each.record())
                position = max((each.position for each in records), default=0)
                records.clear()
                self._requests.put_nowait(pb.FollowRequest(kept=pb.FollowKept(position=position, whole=True)))

    async def _sent(self) -> AsyncIterator[pb.FollowRequest]:
        while True:
            yield await self._requests.get()

    async def caught_up(self, server: Journaled) -> None:
        """Until it has what the server has."""

        def is_so() -> bool:
            if self._task.done():
                self._task.result()
            if self._replay is None:
                return False
            return seen(self._replay.shard, self._replay.moves) == seen(server.shard, server.moves) and same(
                state_of(self._replay.shard), state_of(server.shard)
            )

        while not is_so():
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


def seen(shard: Shard, moves: Moves) -> tuple[object, ...]:
    """What is on its way."""
    return shard.frozen, moves.settled, moves.leaving, None if moves.taken is None else (moves.taken.move, sorted(moves.taken.images))


def test_a_partition_that_goes_before_its_turn_in_a_snapshot_is_copied_as_it_goes(make, tmp_path, monkeypatch) -> None:
    """The journal's new file has pushes of it, and so the snapshot must have what they were made on."""

    async def test() -> History:
        async with two(tmp_path, make) as (giver, receiver, history):
            go = asyncio.Event()
            capture = giver.server.snapshots._capture

            async def later() -> Any:
                await go.wait()
                return await capture()

            monkeypatch.setattr(giver.server.snapshots, "_capture", later)
            writing = asyncio.create_task(giver.server.snapshots.write())
            await asyncio.sleep(0)
            await history.push(giver.server, 3)
            await giver.hand_over(receiver)
            await giver.settle(moved=True)
            go.set()
            await writing
            return history

    history = run(test())
    with DataDirectory(tmp_path / "giver") as directory:
        shard = directory.recover(job_id=JOB, server_id=SERVER).shard
    assert history.has(shard)
    assert shard.partition_ids() == (0,)


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_giver_that_is_started_anew_gives_the_same_again_and_serves_nothing_of_it(make, tmp_path, snapshot) -> None:
    async def first() -> History:
        async with two(tmp_path, make) as (giver, receiver, history):
            await giver.hand_over(receiver)
            if snapshot:
                await giver.server.snapshots.write()
            return history

    history = run(first())

    async def again() -> None:
        async with opened(tmp_path / "giver") as one, opened(tmp_path / "receiver") as other:
            giver, receiver = Moved(one, make, 0), Moved(other, make, 1)
            await giver.know()
            await receiver.know()
            assert one.shard.frozen == ORDER.partition_ids
            with pytest.raises(UnavailableError) as caught:
                await history.push(one, 3, {1})
            assert caught.value.reason == "PARTITION_MOVING"
            assert caught.value.retry_after is not None
            await history.push(one, 3, {0})
            await giver.hand_over(receiver)
            await receiver.settle(moved=True)
            await giver.settle(moved=True)
            await history.push(other, 3, ORDER.partition_ids)
            assert history.has(other.shard)
            assert history.has(one.shard)
            assert (one.shard.partition_ids(), other.shard.partition_ids()) == ((0,), (1, 3))

    run(again())


def test_what_is_not_taken_is_served_on(make, tmp_path) -> None:
    """Up to the note the giver decides by itself."""

    async def test() -> None:
        async with two(tmp_path, make) as (giver, _, history):

            async def fail(order: MoveOrder, progress: Any) -> str:
                with pytest.raises(UnavailableError, match="is moving"):
                    await history.push(giver.server, 3, {1})
                raise UnavailableError("the receiver is gone")

            giver.giver.transfer = fail
            with pytest.raises(NotTaken, match="gone"):
                await giver.giver.give(ORDER)
            await history.push(giver.server, 3)

            async def stands(order: MoveOrder, progress: Any) -> str:
                await asyncio.Event().wait()
                raise AssertionError

            giver.giver.transfer = stands
            giver.giver._idle_limit_s = 0.01
            with pytest.raises(NotTaken, match=r"took nothing for 0\.01 s"):
                await giver.giver.give(replace(ORDER, move=2))
            await history.push(giver.server, 4)
            for wrong, reason in (
                (replace(ORDER, move=3, partition_ids=frozenset({9})), "LAYOUT_CONFLICT"),
                (replace(ORDER, move=3, receiver_index=0), "LAYOUT_CONFLICT"),
                (replace(ORDER, move=2), "MOVE_GIVEN_UP"),
                (replace(ORDER, move=5, giver_incarnation="another"), "MOVE_GIVEN_UP"),
            ):
                with pytest.raises(ShoalError) as caught:
                    await giver.giver.give(wrong)
                assert caught.value.reason == reason
            with pytest.raises(NotTaken, match="server 1 is away"):
                await giver.giver.give(replace(ORDER, move=6, receiver_address=""))
            await history.push(giver.server, 5)
            assert history.has(giver.server.shard)

    run(test())


def test_partitions_without_values_are_not_given(make, tmp_path) -> None:
    async def test() -> None:
        async with opened(tmp_path / "giver") as server:
            giver = Moved(server, make, 0)
            await giver.know()
            with pytest.raises(PreconditionError) as caught:
                await giver.giver.give(ORDER)
            assert caught.value.reason == "PARTITION_UNINITIALIZED"
            assert not server.shard.frozen

    run(test())


def test_a_push_that_is_on_its_way_when_its_partition_is_frozen_goes_with_it(make, tmp_path) -> None:
    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, history):
            journal, following = giver.server.journal, Follows()
            await journal.append(None, lambda: journal.follow(following))
            await journal.append(None, lambda: journal.hold(position=0, confirmed=0))
            under_way = await giver.server.changes.push(history.upload(make.spec(1, offset=6), 3))
            giving = asyncio.create_task(giver.hand_over(receiver))
            await until(lambda: PUSH in following.heard)
            assert not giver.has_begun
            journal.follow_no_more()
            await giving
            assert (await under_way).version == 4
            assert receiver.server.moves.taken is not None
            assert receiver.server.moves.taken.images[1].version == 4
            assert receiver.server.moves.taken.images[1].sequences == {"a": 3}

    run(test())


def test_what_a_receiver_cannot_have_it_refuses_and_the_giver_serves_on(make, tmp_path) -> None:
    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, _):

            async def refused(move: int, kind: type[ShoalError], reason: str) -> None:
                with pytest.raises(NotTaken) as caught:
                    await giver.hand_over(receiver, replace(ORDER, move=move))
                assert (type(caught.value.error), caught.value.error.reason) == (kind, reason)
                assert not giver.server.shard.frozen
                assert receiver.server.moves.taken is None

            giver.server.members = replace(MEMBERS, generation=9)
            await refused(1, UnavailableError, "MEMBERSHIP_UNKNOWN")
            giver.server.members = MEMBERS
            other = optimizer_settings(name="sgd", hyperparameters={"lr": 0.1})
            own = receiver.server.configuration
            receiver.server.configuration = Configuration(configured=other, optimizer=other, consistency=Consistency())
            await refused(2, PreconditionError, "OPTIMIZER_CONFLICT")
            receiver.server.configuration = own
            receiver.receiver._job_id = "other"
            await refused(3, UnknownResourceError, "JOB_UNKNOWN")
            receiver.receiver._job_id = JOB
            receiver.server.moves.settled = 4
            await refused(4, PreconditionError, "MOVE_SETTLED")
            last = replace(ORDER, move=5)
            await giver.hand_over(receiver, last)
            await receiver.settle(moved=True, move=5)
            for settled, reason in ((5, "MOVE_SETTLED"), (0, "LAYOUT_CONFLICT")):  # it has them
                receiver.server.moves.settled = settled
                with pytest.raises(PreconditionError) as caught:
                    await receiver.receiver.take(giver.giver._chunks(last, lambda: None))
                assert caught.value.reason == reason
                assert giver.server.shard.frozen  # it was noted: the coordinator will say so

    run(test())


@pytest.mark.parametrize(
    "damage",
    [
        lambda chunks: chunks[:-1],
        lambda chunks: [chunks[0], *chunks[2:]],
        lambda chunks: chunks[1:],
        lambda chunks: [chunks[0], chunks[1][:-1] + bytes([chunks[1][-1] ^ 1]), *chunks[2:]],
        lambda chunks: [],
    ],
)
def test_a_stream_that_is_none_takes_nothing_over(make, tmp_path, damage) -> None:
    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, _):
            giver.server.shard.freeze(ORDER.partition_ids)
            chunks = [chunk async for chunk in giver.giver._chunks(ORDER, lambda: None)]

            async def messages() -> AsyncIterator[bytes]:
                for chunk in damage(chunks):
                    yield chunk

            with pytest.raises(InvalidRequestError) as caught:
                await receiver.receiver.take(messages())
            assert caught.value.reason == "STREAM_MALFORMED"
            assert receiver.server.moves.taken is None

    run(test())


def test_a_fresh_receiver_goes_on_with_the_givers_clocks_fence_and_batches(make, tmp_path) -> None:
    """One that has values keeps its own clocks."""

    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, history):
            clocks = Clocks()
            clocks.follow("abc")
            for member, finished in (("a", 7), ("b", 7), ("a", 9), ("b", 8)):
                clocks.report(member, finished)
            clocks.rest("c")
            clocks.open(5)
            clocks.has_pushed("b")  # by whose count a joiner finds out where it begins on each server
            fence = Fence.restored(generation=4, members="abc", put_out={"z": 2, "a": 1})
            giver.server.members = Members.of(fence, clocks)
            giver.server.shard.add_batches([(50, 60)])
            await giver.hand_over(receiver)
            mine = receiver.membership.clocks
            assert (mine.members, mine.slowest, mine.opened) == (clocks.members, clocks.slowest, 5)
            assert receiver.membership.fence.put_out == {"z": 2, "a": 1}
            assert 55 in receiver.server.shard.batches
            await receiver.settle(moved=True)
            await giver.settle(moved=True)
            mine.report("b", 9)
            await history.push(receiver.server, 3, {1})
            await receiver.hand_over(giver, replace(ORDER, move=2, receiver_index=0, partition_ids=frozenset({1})))
            assert giver.membership.clocks.members["b"].clock == 0

    run(test())


def test_a_receiver_that_holds_frozen_tensors_alone_goes_on_with_the_givers_clocks(make, tmp_path) -> None:
    """No member tells it of clocks: neither before trained tensors come, nor after they have gone."""

    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, _):

            async def move(number: int, partition_id: int, there: set[int]) -> None:
                """`there`: what the receiver has afterwards."""
                one, other = (giver, receiver) if partition_id in there else (receiver, giver)
                await one.hand_over(other, replace(ORDER, move=number, partition_ids=frozenset({partition_id}), receiver_index=other.index))
                for server in (giver, receiver):
                    owners = {spec.partition_id: int(spec.partition_id in there) for spec in specs(make)}
                    partitions = {spec.partition_id: spec for spec in specs(make) if owners[spec.partition_id] == server.index}
                    layout = layout_of(make, server.index, moved=False)
                    server.of_coordinator = replace(
                        layout, epoch=number + 1, partitions=partitions, owners=owners, frozen=frozenset({"bias"})
                    )
                    await server.layouts.at_least(number + 1)
                    await server.server.changes.move(settled_record(number), lambda server=server: server.server.moves.settle(number))

            def giver_is_at(clock: int) -> None:
                clocks = Clocks()
                clocks.follow("abc")
                clocks.report("a", 1)
                clocks.report("a", 1 + clock)
                giver.server.members = Members.of(Fence.restored(generation=4, members="abc", put_out={}), clocks)

            def receivers() -> int:
                return receiver.membership.clocks.members["a"].clock

            giver_is_at(1)
            await move(1, 3, {3})
            assert receivers() == 1
            giver_is_at(5)
            await move(2, 1, {1, 3})
            assert receivers() == 5
            giver_is_at(7)
            await move(3, 0, {0, 1, 3})
            assert receivers() == 5  # it has been told of clocks since
            await move(4, 0, {1, 3})
            await move(5, 1, {3})
            giver_is_at(9)
            await move(6, 1, {1, 3})
            assert receivers() == 9

    run(test())
    with DataDirectory(tmp_path / "receiver") as directory:
        layout = directory.recover(job_id=JOB, server_id=SERVER).layout
    assert layout is not None
    assert layout.frozen == {"bias"}


def test_a_shard_map_says_which_tensors_are_frozen_and_one_of_an_older_release_does_not(make) -> None:
    shard_map = coordinator_pb2.ShardMap(epoch=1, partitions=[coordinator_pb2.Partition(partition_id=0, primary=0)])
    for index, (name, frozen) in enumerate((("weight", False), ("table", True))):
        shard_map.tensors.append(coordinator_pb2.TensorSpec(name=name, shape=[4], dtype="float32", frozen=frozen))
        shard_map.partitions[0].pieces.append(coordinator_pb2.Piece(tensor_index=index, length=4))
    layout = layout_from_shard_map(shard_map, server_index=0)
    assert layout.frozen == {"table"}
    written = layout_to_json(layout)
    assert layout_from_json(written) == layout
    del written["frozen"]
    assert layout_from_json(written) == replace(layout, frozen=frozenset())


def test_runs_of_batches_of_two_servers_become_one() -> None:
    batches = Batches([(10, 20), (30, 40), (60, 61)])
    batches.add_runs([(20, 25), (35, 50), (5, 6), (12, 13), (1, 3)])
    assert sorted(batches.runs()) == [(1, 3), (5, 6), (10, 25), (30, 50), (60, 61)]
    assert 24 in batches
    assert 25 not in batches
    batches.add([25, 4])
    assert sorted(batches.runs()) == [(1, 3), (4, 6), (10, 26), (30, 50), (60, 61)]


def test_members_that_another_server_knows_to_have_been_put_out_are_fenced_off_here() -> None:
    fence = Fence.restored(generation=5, members="ab", put_out={"b": 4, "x": 5})
    fence.remember(Fence.restored(generation=4, members="abc", put_out={"b": 2, "y": 3, "x": 1, "a": 3}))
    assert fence.put_out == {"y": 3, "a": 3, "c": 5, "b": 4, "x": 5}
    assert list(fence.put_out)[-2:] == ["b", "x"]  # the oldest are forgotten first


def test_a_map_that_would_lose_values_without_a_word_is_refused(make) -> None:
    shard = make.shard(*specs(make))
    moves = Moves(shard)
    before = layout_of(make, 0, moved=False)
    moves.check(replace(before, epoch=7), before=before)
    fewer, more = layout_of(make, 0, moved=True), replace(before, partitions={**before.partitions, 4: make.spec(4)})
    other = replace(before, partitions={**before.partitions, 1: make.spec(1, length=7)})
    for layout in (fewer, more, other):
        with pytest.raises(PreconditionError) as caught:
            moves.check(layout, before=before)
        assert caught.value.reason == "LAYOUT_CONFLICT"
    moves.leave(1, ORDER.partition_ids)
    moves.check(fewer, before=before)
    Moves(Shard()).check(more, before=None)  # it has lost what it held, and workers bring their values


@pytest.mark.parametrize("mode", [ConsistencyMode.SSP, ConsistencyMode.BSP])
def test_who_waits_for_others_is_told_when_its_partition_leaves(make, mode) -> None:
    async def test() -> None:
        membership = Membership(fence=Fence(), clocks=Clocks())
        membership.consistency = Consistency(mode=mode)
        membership.learn(1, "ab")
        shard = make.shard(*specs(make))
        membership.finished("a", 0)
        membership.finished("a", 5)

        def check() -> None:
            shard.check_open(make.spec(1))

        waiting = [asyncio.create_task(membership.proceed("a", 1, wait=timedelta(minutes=9), check=check))]
        if mode is ConsistencyMode.BSP:
            waiting.append(asyncio.create_task(membership.let_in("a", 1, 7, check=check)))
        await asyncio.sleep(0)
        shard.freeze({0})
        membership.wake()
        await asyncio.sleep(0.01)
        assert not any(each.done() for each in waiting)
        shard.freeze({1})
        membership.wake()
        for each in waiting:
            with pytest.raises(UnavailableError) as caught:
                await each
            assert caught.value.reason == "PARTITION_MOVING"

    run(asyncio.wait_for(test(), 20))


class Told:
    """The coordinator, as a giver's reports reach it."""

    def __init__(self, moved: Moved) -> None:
        self.reports: list[tuple[int, str, str]] = []
        self.mover = Mover(
            moves=moved.server.moves, giver=moved.giver, layouts=moved.layouts, changes=moved.server.changes, report=self._report
        )

    def _report(self, move: int, *, receiver: str = "", reason: str = "", giver_failed: bool = False) -> None:
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


def test_a_decision_that_comes_while_the_note_is_on_its_way_ends_the_freeze(make, tmp_path) -> None:
    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, history):
            server, told = giver.server, Told(giver)
            following = Follows()
            await server.journal.append(None, lambda: server.journal.follow(following))
            await server.journal.append(None, lambda: server.journal.hold(position=0, confirmed=0))
            giver.gives_to(receiver)
            async with told.running() as mover:
                mover.ordered(ORDER)
                await until(lambda: LEAVING in following.heard)
                mover.settled(1, 1)  # the coordinator has decided without a word of this server's
                await asyncio.sleep(0.01)
                assert server.shard.frozen
                server.journal.follow_no_more()
                await until(lambda: not server.shard.frozen)
                assert server.moves.settled == 1
                assert not told.reports
            await history.push(server, 3)
            assert history.has(server.shard)

    run(test())


class Follows:
    """Hears of records, and confirms none."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def made(self, record: Record) -> None:
        raise AssertionError

    def written(self, record: Record) -> int:
        self.heard.append(record.kind)
        return len(self.heard)


def test_a_move_is_ordered_again_and_again_and_made_once(make, tmp_path) -> None:
    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, _):
            told, transfers = Told(giver), 0
            giver.gives_to(receiver)
            transfer = giver.giver.transfer
            assert transfer is not None

            async def counted(order: MoveOrder, progress: Callable[[], None]) -> str:
                nonlocal transfers
                transfers += 1
                return await transfer(order, progress)

            giver.giver.transfer = counted
            async with told.running() as mover:
                mover.ordered(ORDER)
                await until(lambda: bool(giver.server.shard.frozen))
                mover.ordered(ORDER)
                await until(lambda: bool(told.reports))
                assert told.reports == [(1, "receiver", "")]
                mover.ordered(ORDER)  # the report was lost
                await until(lambda: len(told.reports) == 2)
                assert told.reports[1] == (1, "receiver", "")
                assert transfers == 1
                giver.of_coordinator = layout_of(make, 0, moved=True)
                mover.settled(1, 2)
                mover.ordered(ORDER)
                await until(lambda: giver.server.moves.settled == 1)
                await asyncio.sleep(0.01)
                assert len(told.reports) == 2
                assert giver.server.shard.partition_ids() == (0,)

    run(test())


def test_a_giver_that_cannot_put_together_what_it_sends_says_so_and_serves_on(make, tmp_path, monkeypatch) -> None:
    async def take(messages: AsyncIterator[bytes], context: Any) -> bytes:
        async for _ in messages:
            pass
        return b""

    def fails(partition_id: int) -> None:
        raise KeyError(partition_id)

    async def test() -> None:
        server = grpc.aio.server()
        handlers = {"TakePartitions": grpc.stream_unary_rpc_method_handler(take)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("shoal.v1.ParameterServer", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with two(tmp_path, make) as (giver, _, history):
            told = Told(giver)
            monkeypatch.setattr(giver.server.shard, "frozen_image", fails)
            async with told.running() as mover:
                mover.ordered(replace(ORDER, receiver_address=f"127.0.0.1:{port}"))
                await until(lambda: bool(told.reports))
            assert told.reports[0][1] == ""
            assert "could not be put together" in told.reports[0][2]
            assert told.blames_itself
            await history.push(giver.server, 3)
        await server.stop(None)

    run(test())


def test_a_giver_says_whether_it_is_to_blame_that_partitions_were_not_taken(make, tmp_path) -> None:
    """Else the receivers would be left out, one after another, for a giver whose disk is full."""

    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, history):
            told = Told(giver)
            giver.gives_to(receiver)
            takes = giver.giver.transfer
            assert takes is not None
            async with told.running() as mover:
                with ExitStack() as disk:

                    async def taken_and_full(order: MoveOrder, progress: Callable[[], None]) -> str:
                        incarnation = await takes(order, progress)
                        disk.enter_context(largest_file(10))
                        return incarnation

                    giver.giver.transfer = taken_and_full
                    mover.ordered(ORDER)
                    await until(lambda: bool(told.reports))
                assert told.reports[0][:2] == (1, "")
                assert told.reports[0][2].startswith("JOURNAL_FAILED")
                assert told.blames_itself

                async def refuses(order: MoveOrder, progress: Callable[[], None]) -> str:
                    raise UnavailableError("its disk is full, too", reason="JOURNAL_FAILED")

                giver.giver.transfer = refuses
                mover.ordered(replace(ORDER, move=2))
                await until(lambda: len(told.reports) == 2)
                assert told.reports[1] == (2, "", "JOURNAL_FAILED: its disk is full, too")
                assert not told.blames_itself
            await history.push(giver.server, 3)
            assert history.has(giver.server.shard)

    run(test())


async def all_but_the_end(giver: Moved, receiver: Moved) -> tuple[asyncio.Task[None], Follows, asyncio.Event]:
    """The receiver has all partitions, and hears that this is all when the event is set; its changes wait for a backup."""
    giver.server.shard.freeze(ORDER.partition_ids)
    *first, last = [chunk async for chunk in giver.giver._chunks(ORDER, lambda: None)]
    server, go, following = receiver.server, asyncio.Event(), Follows()

    async def messages() -> AsyncIterator[bytes]:
        for chunk in first:
            yield chunk
        await go.wait()
        yield last

    taking = asyncio.create_task(receiver.receiver.take(messages()))
    await until(lambda: server.moves.coming is not None and server.moves.coming.images.keys() == ORDER.partition_ids)
    await server.journal.append(None, lambda: server.journal.follow(following))
    await server.journal.append(None, lambda: server.journal.hold(position=0, confirmed=0))
    return taking, following, go


def test_a_stream_whose_move_is_settled_meanwhile_takes_nothing_and_the_server_starts_again(make, tmp_path) -> None:
    """Also while the decision waits for a backup."""

    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, _):
            server, told = receiver.server, Told(receiver)
            taking, following, go = await all_but_the_end(giver, receiver)
            async with told.running() as mover:
                mover.settled(1, 1)
                await until(lambda: SETTLED in following.heard)
                go.set()
                with pytest.raises(PreconditionError) as caught:
                    await taking
                assert caught.value.reason == "MOVE_SETTLED"
                server.journal.follow_no_more()
                await until(lambda: server.moves.coming is None)
            assert not server.failures

    run(test())
    with DataDirectory(tmp_path / "receiver") as directory:
        moves = directory.recover(job_id=JOB, server_id=SERVER).moves
    assert (moves.settled, moves.taken, moves.coming) == (1, None, None)


def test_a_receiver_does_not_say_that_it_has_what_came_too_late(make, tmp_path) -> None:
    """The decision comes while the last record of the stream is on its way."""

    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, _):
            server = receiver.server
            taking, following, go = await all_but_the_end(giver, receiver)
            go.set()
            await until(lambda: TAKEN in following.heard)
            server.moves.settled = 1
            server.journal.follow_no_more()
            with pytest.raises(PreconditionError) as caught:
                await taking
            assert caught.value.reason == "MOVE_SETTLED"
            assert server.moves.taken is None

    run(test())


def test_a_stream_without_partitions_is_refused(make, tmp_path) -> None:
    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, _):
            with pytest.raises(InvalidRequestError) as caught:
                await receiver.receiver.take(giver.giver._chunks(replace(ORDER, partition_ids=frozenset()), lambda: None))
            assert caught.value.reason == "STREAM_MALFORMED"

    run(test())


def test_a_record_of_a_move_that_nothing_came_of_takes_nothing(make) -> None:
    """However it came into the journal: a server that could not make it again would never start."""
    shard = make.shard(*specs(make))
    image = shard.image(1)
    assert image is not None
    moves = Moves(Shard())
    moves.take(1, [], [(1, 3)])
    moves.take(1, [1], ())
    moves.bring(2, image)
    moves.take(1, [1], ())
    moves.take(2, [1, 3], ())
    assert moves.taken is None
    moves.settle(2)
    moves.bring(2, image)
    moves.take(2, [1], ())
    assert (moves.taken, moves.coming) == (None, None)


def test_the_journal_does_not_go_back_to_the_map_before_one_that_is_on_its_way(make, tmp_path) -> None:
    async def test() -> History:
        async with two(tmp_path, make) as (giver, receiver, history):
            await giver.hand_over(receiver)
            adopting = asyncio.create_task(receiver.settle(moved=True))
            await asyncio.sleep(0)
            assert receiver.server.layout is not None
            assert receiver.server.layout.epoch == 1
            receiver.server.changes.members_changed()
            await receiver.server.changes.in_order(lambda: None)
            await adopting
            await history.push(receiver.server, 3, ORDER.partition_ids)
            return history

    history = run(test())
    with DataDirectory(tmp_path / "receiver") as directory:
        recovered = directory.recover(job_id=JOB, server_id=SERVER)
    assert recovered.shard.partition_ids() == (1, 3)
    assert history.has(recovered.shard)


def test_a_copy_of_an_older_move_that_comes_late_takes_no_place(make) -> None:
    shard = make.shard(*specs(make))
    old = shard.image(1)
    assert old is not None
    newer = replace(old, version=2)
    moves = Moves(Shard())
    moves.bring(3, newer)
    moves.bring(2, old)
    moves.take(3, [1], ())
    moves.bring(2, old)
    moves.take(2, [1], ())
    assert moves.taken is not None
    assert (moves.taken.move, moves.taken.images[1].version) == (3, 2)
    assert moves.coming is None
