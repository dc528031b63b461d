"""The partitions that a receiver accepts from a giver, and those that it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from shoal_common.errors import (
    InvalidRequestError,
    PreconditionError,
    ShoalError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_ps_server.configuration import Configuration
from shoal_ps_server.consistency.clocks import Clocks, Consistency
from shoal_ps_server.consistency.fence import Fence
from shoal_ps_server.replication.transfer_source import NotTaken
from shoal_ps_server.shard.optimizer import optimizer_settings
from shoal_ps_server.shard.shard import Shard
from shoal_ps_server.storage.directory import DataDirectory
from shoal_ps_server.storage.image import Members
from shoal_ps_server.storage.moves import Moves
from shoal_ps_server.storage.recovery import SETTLED, TAKEN, settled_record

from tests.unit.ps_server.journaled import JOB, SERVER, run
from tests.unit.ps_server.moving import (
    MEMBERS,
    ORDER,
    Moved,
    ReportRecorder,
    SilentFollower,
    layout_of,
    specs,
    two,
    until,
)


def test_sink_refuses_partitions_it_cannot_hold_and_the_source_continues_to_serve(
    make, tmp_path
) -> None:
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
            receiver.server.configuration = Configuration(
                configured=other, optimizer=other, consistency=Consistency()
            )
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
            # the receiver has them
            for settled, reason in ((5, "MOVE_SETTLED"), (0, "LAYOUT_CONFLICT")):
                receiver.server.moves.settled = settled
                with pytest.raises(PreconditionError) as caught:
                    await receiver.receiver.take(giver.giver._chunks(last, lambda: None))
                assert caught.value.reason == reason
                # the move was recorded: the coordinator must decide
                assert giver.server.shard.frozen

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
def test_invalid_stream_moves_nothing(make, tmp_path, damage) -> None:
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


def test_fresh_sink_continues_with_the_sources_clocks_fence_and_batches(make, tmp_path) -> None:
    """A receiver without values takes over the giver's clocks, fence and batches. One that has
    values keeps its own clocks."""

    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, history):
            clocks = Clocks()
            clocks.follow("abc")
            for member, finished in (("a", 7), ("b", 7), ("a", 9), ("b", 8)):
                clocks.report(member, finished)
            clocks.rest("c")
            clocks.open(5)
            # clocks by which a joiner is placed on each server
            clocks.has_pushed("b")
            fence = Fence.restored(generation=4, members="abc", evicted={"z": 2, "a": 1})
            giver.server.members = Members.of(fence, clocks)
            giver.server.shard.add_batches([(50, 60)])
            await giver.hand_over(receiver)
            mine = receiver.membership.clocks
            assert (mine.members, mine.slowest, mine.opened) == (clocks.members, clocks.slowest, 5)
            assert receiver.membership.fence.evicted == {"z": 2, "a": 1}
            assert 55 in receiver.server.shard.batches
            await receiver.settle(moved=True)
            await giver.settle(moved=True)
            mine.report("b", 9)
            await history.push(receiver.server, 3, {1})
            await receiver.hand_over(
                giver, replace(ORDER, move=2, receiver_index=0, partition_ids=frozenset({1}))
            )
            assert giver.membership.clocks.members["b"].clock == 0

    run(test())


def test_sink_with_only_frozen_tensors_continues_with_the_sources_clocks(make, tmp_path) -> None:
    """A receiver that has only frozen tensors, for which members report no clocks, takes over the
    giver's clocks when trained tensors arrive."""

    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, _):

            async def move(number: int, partition_id: int, there: set[int]) -> None:
                """Moves one partition; afterwards the receiver has the partitions `there`."""
                one, other = (giver, receiver) if partition_id in there else (receiver, giver)
                await one.hand_over(
                    other,
                    replace(
                        ORDER,
                        move=number,
                        partition_ids=frozenset({partition_id}),
                        receiver_index=other.index,
                    ),
                )
                for server in (giver, receiver):
                    owners = {
                        spec.partition_id: int(spec.partition_id in there) for spec in specs(make)
                    }
                    partitions = {
                        spec.partition_id: spec
                        for spec in specs(make)
                        if owners[spec.partition_id] == server.index
                    }
                    layout = layout_of(make, server.index, moved=False)
                    server.of_coordinator = replace(
                        layout,
                        epoch=number + 1,
                        partitions=partitions,
                        owners=owners,
                        frozen=frozenset({"bias"}),
                    )
                    await server.layouts.at_least(number + 1)
                    await server.server.changes.move(
                        settled_record(number),
                        lambda server=server: server.server.moves.settle(number),
                    )

            def source_is_at(clock: int) -> None:
                clocks = Clocks()
                clocks.follow("abc")
                clocks.report("a", 1)
                clocks.report("a", 1 + clock)
                giver.server.members = Members.of(
                    Fence.restored(generation=4, members="abc", evicted={}), clocks
                )

            def receivers() -> int:
                return receiver.membership.clocks.members["a"].clock

            source_is_at(1)
            await move(1, 3, {3})
            assert receivers() == 1
            source_is_at(5)
            await move(2, 1, {1, 3})
            assert receivers() == 5
            source_is_at(7)
            await move(3, 0, {0, 1, 3})
            assert receivers() == 5  # it has trained tensors, so it keeps its own clocks
            await move(4, 0, {1, 3})
            await move(5, 1, {3})
            source_is_at(9)
            await move(6, 1, {1, 3})
            assert receivers() == 9

    run(test())
    with DataDirectory(tmp_path / "receiver") as directory:
        layout = directory.recover(job_id=JOB, server_id=SERVER).layout
    assert layout is not None
    assert layout.frozen == {"bias"}


async def all_but_the_end(
    giver: Moved, receiver: Moved
) -> tuple[asyncio.Task[None], SilentFollower, asyncio.Event]:
    """Sends the receiver all partitions but not the end of the stream, which follows when the
    returned event is set. The receiver's changes wait for a backup."""
    giver.server.shard.freeze(ORDER.partition_ids)
    *first, last = [chunk async for chunk in giver.giver._chunks(ORDER, lambda: None)]
    server, go, following = receiver.server, asyncio.Event(), SilentFollower()

    async def messages() -> AsyncIterator[bytes]:
        for chunk in first:
            yield chunk
        await go.wait()
        yield last

    taking = asyncio.create_task(receiver.receiver.take(messages()))
    await until(
        lambda: (
            server.moves.coming is not None
            and server.moves.coming.images.keys() == ORDER.partition_ids
        )
    )
    await server.journal.append(None, lambda: server.journal.follow(following))
    await server.journal.append(None, lambda: server.journal.hold(position=0, confirmed=0))
    return taking, following, go


def test_stream_whose_move_is_settled_meanwhile_moves_nothing_and_the_server_restarts(
    make, tmp_path
) -> None:
    """A stream whose move has been settled in the meantime takes nothing over, even while the
    settlement is waiting for a backup."""

    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, _):
            server, recorder = receiver.server, ReportRecorder(receiver)
            taking, following, go = await all_but_the_end(giver, receiver)
            async with recorder.running() as mover:
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


def test_sink_does_not_report_partitions_that_arrived_too_late(make, tmp_path) -> None:
    """A receiver does not acknowledge partitions if the move is settled while the last record of
    their stream is being written."""

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
                await receiver.receiver.take(
                    giver.giver._chunks(replace(ORDER, partition_ids=frozenset()), lambda: None)
                )
            assert caught.value.reason == "STREAM_MALFORMED"

    run(test())


def test_record_of_a_failed_move_moves_nothing(make) -> None:
    """Records of moves that ended without effect take nothing over. A server that could not apply
    such a record again would never start."""
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


def test_late_copy_of_an_older_move_is_ignored(make) -> None:
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
