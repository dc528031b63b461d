"""Partitions that move between two servers: no matter when a server is killed, snapshotted or
followed during the move, one of the two has all values, to the last bit."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from shoal_common.errors import UnavailableError
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_ps_server.metrics import Metrics
from shoal_ps_server.replication.items import (
    FORMAT_VERSION,
    PARTITION,
    RECORD,
    STATE,
    WHOLE,
    received_items,
)
from shoal_ps_server.replication.primary import Backup
from shoal_ps_server.session import Place
from shoal_ps_server.shard.shard import Shard
from shoal_ps_server.storage.directory import DataDirectory
from shoal_ps_server.storage.image import ServerImage, state_from_json
from shoal_ps_server.storage.moves import Moves
from shoal_ps_server.storage.record import read_all
from shoal_ps_server.storage.recovery import Recovered, Replay, settled_record
from shoal_ps_server.storage.snapshot import partition_from_bytes

from tests.unit.ps_server.journaled import JOB, SERVER, Journaled, file, opened, run, same, state_of
from tests.unit.ps_server.moving import ORDER, History, Moved, layout_of, specs, two, until


def cuts(path: Path, tmp_path: Path) -> list[tuple[int, Recovered]]:
    """Recovers the server from the journal cut after each of its records. Returns pairs of the
    number of preceding records and the recovered state."""
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


def after_the_decision(recovered: Recovered, make: Any, index: int, *, moved: bool) -> Shard:
    """Tells a recovered server how the move ended and returns its shard."""
    layout = layout_of(make, index, moved=moved)
    members = recovered.members.members | recovered.members.evicted.keys()
    recovered.moves.adopt(layout, before=recovered.layout, members=members)
    recovered.moves.settle(1)
    return recovered.shard


@pytest.mark.parametrize("moved", [True, False])
def test_crash_between_any_two_records_of_a_move_leaves_one_owner_with_all_acknowledged_pushes(
    make, tmp_path, moved
) -> None:
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
                moves.leaving is not None
                or moves.taken is not None
                or moves.settled
                or (recovered.layout and recovered.layout.epoch > 1)
            )
            if moves.leaving is not None:
                assert recovered.shard.frozen == ORDER.partition_ids
                with pytest.raises(UnavailableError, match="is moving"):
                    recovered.shard.push(history.upload(make.spec(1, offset=6), 3))
            if not noted and moved:
                continue  # the coordinator has not decided yet
            kept[index] += 1
            shard = after_the_decision(recovered, make, index, moved=moved)
            assert not shard.frozen
            assert history.has(shard)
            if index == 1 or noted:
                mine = ORDER.partition_ids if index == 1 else {0} if moved else {0, 1, 3}
                assert set(shard.partition_ids()) == (mine if moved or index == 0 else set())
                assert all(shard.version(number) >= 3 for number in shard.partition_ids())
    assert min(kept.values()) > 3


Step = Callable[[], Awaitable[object]]


async def steps(giver: Moved, receiver: Moved, history: History) -> list[Step]:
    """Returns the steps of a move and of a move back, with pushes in between."""
    back = replace(ORDER, move=2, partition_ids=frozenset({3}), receiver_index=0)

    async def settle_back() -> None:
        for server in (giver, receiver):
            layout = layout_of(server.make, server.index, moved=True)
            owners = {**layout.owners, 3: 0}
            partitions = {
                spec.partition_id: spec
                for spec in specs(server.make)
                if owners[spec.partition_id] == server.index
            }
            server.of_coordinator = replace(layout, epoch=3, owners=owners, partitions=partitions)
            await server.layouts.at_least(3)
            await server.server.changes.move(
                settled_record(2), lambda server=server: server.server.moves.settle(2)
            )

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
def test_snapshots_during_a_move_contain_all_partitions(make, tmp_path, at) -> None:
    """A snapshot that begins at any step of a move and copies its partitions during the next steps
    is complete."""

    async def test() -> tuple[list[dict[int, Any]], History]:
        async with two(tmp_path, make) as (giver, receiver, history):
            snapshots = []
            for number, step in enumerate(await steps(giver, receiver, history)):
                if number == at:
                    snapshots = [
                        asyncio.create_task(each.server.snapshots.write())
                        for each in (giver, receiver)
                    ]
                await step()
            await asyncio.gather(*snapshots)
            return [state_of(each.server.shard) for each in (giver, receiver)], history

    states, history = run(test())
    for name, state in zip(("giver", "receiver"), states, strict=True):
        with DataDirectory(tmp_path / name) as directory:
            recovered = directory.recover(job_id=JOB, server_id=SERVER)
        assert same(state_of(recovered.shard), state)
        assert history.has(recovered.shard)
        assert {number: image.version for number, image in state.items()} == (
            {0: 5, 3: 5} if name == "giver" else {1: 5}
        )


@pytest.mark.parametrize("at", range(9))
def test_backup_that_starts_to_follow_during_a_move_equals_its_primary(make, tmp_path, at) -> None:
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


def test_partition_that_leaves_and_returns_before_a_backup_has_it_keeps_all_pushes(
    make, tmp_path, monkeypatch
) -> None:
    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, history), asyncio.timeout(20):
            go, follower = asyncio.Event(), Follower(giver.server)
            wait = follower._backup._until

            async def later(*arguments: Any) -> None:
                await go.wait()
                await wait(*arguments)

            monkeypatch.setattr(follower._backup, "_until", later)
            # It gets partition 0. It gets the others when the event is set.
            await until(lambda: giver.server.journal._follower is not None)
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
        self._backup.placed(
            Place(epoch=1, follows=False, primary_address="", backup_id="b", in_sync=False)
        )
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
                images.append(
                    partition_from_bytes(
                        item.fields, item.payload, spec, state.configuration.optimizer
                    )
                )
            elif item.kind == WHOLE:
                self._replay = Replay(ServerImage(state=state, partitions=tuple(images)))
            elif item.kind == RECORD:
                records.append(item)
            if self._replay is not None:
                for each in records:
                    self._replay.make(each.record())
                position = max((each.position for each in records), default=0)
                records.clear()
                self._requests.put_nowait(
                    pb.FollowRequest(kept=pb.FollowKept(position=position, whole=True))
                )

    async def _sent(self) -> AsyncIterator[pb.FollowRequest]:
        while True:
            yield await self._requests.get()

    async def caught_up(self, server: Journaled) -> None:
        """Waits until the backup has the same state as the server."""

        def is_so() -> bool:
            if self._task.done():
                self._task.result()
            if self._replay is None:
                return False
            return seen(self._replay.shard, self._replay.moves) == seen(
                server.shard, server.moves
            ) and same(state_of(self._replay.shard), state_of(server.shard))

        while not is_so():
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


def seen(shard: Shard, moves: Moves) -> tuple[object, ...]:
    """Returns the state of the moves in progress."""
    return (
        shard.frozen,
        moves.settled,
        moves.leaving,
        None if moves.taken is None else (moves.taken.move, sorted(moves.taken.images)),
    )


def test_partition_that_moves_before_its_turn_in_a_snapshot_is_copied_as_it_leaves(
    make, tmp_path, monkeypatch
) -> None:
    """A partition that moves away before a running snapshot has copied it is copied at that moment.
    The new journal file already has pushes to it, which need the values before them."""

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
def test_restarted_source_sends_the_same_again_and_serves_none_of_it(
    make, tmp_path, snapshot
) -> None:
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


def test_journal_does_not_revert_to_the_map_before_a_pending_one(make, tmp_path) -> None:
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
