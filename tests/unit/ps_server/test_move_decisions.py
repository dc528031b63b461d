"""The giver decides on a move until it has recorded that the partitions are leaving. From then on,
the coordinator decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from shoal_common.errors import PreconditionError, ShoalError, UnavailableError
from shoal_ps_server.replication.transfer_source import NotTaken
from shoal_ps_server.session import MoveOrder
from shoal_ps_server.shard.shard import Shard
from shoal_ps_server.storage.moves import Moves
from shoal_ps_server.storage.recovery import LEAVING, PUSH

from tests.unit.ps_server.journaled import largest_file, opened, run
from tests.unit.ps_server.moving import (
    ORDER,
    Moved,
    ReportRecorder,
    SilentFollower,
    layout_of,
    specs,
    two,
    until,
)


def test_rejected_partitions_continue_to_be_served(make, tmp_path) -> None:
    """A giver continues to serve a partition that was not taken. Until it records that the
    partition is leaving, it decides by itself."""

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

            async def stall(order: MoveOrder, progress: Any) -> str:
                await asyncio.Event().wait()
                raise AssertionError

            giver.giver.transfer = stall
            giver.giver._idle_limit_s = 0.01
            with pytest.raises(NotTaken, match=r"received nothing for 0\.01 s"):
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
            with pytest.raises(NotTaken, match="server 1 is not available"):
                await giver.giver.give(replace(ORDER, move=6, receiver_address=""))
            await history.push(giver.server, 5)
            assert history.has(giver.server.shard)

    run(test())


def test_partitions_without_values_are_not_sent(make, tmp_path) -> None:
    async def test() -> None:
        async with opened(tmp_path / "giver") as server:
            giver = Moved(server, make, 0)
            await giver.know()
            with pytest.raises(PreconditionError) as caught:
                await giver.giver.give(ORDER)
            assert caught.value.reason == "PARTITION_UNINITIALIZED"
            assert not server.shard.frozen

    run(test())


def test_push_in_progress_when_its_partition_is_frozen_moves_with_it(make, tmp_path) -> None:
    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, history):
            journal, following = giver.server.journal, SilentFollower()
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


def test_map_that_would_silently_lose_values_is_refused(make) -> None:
    shard = make.shard(*specs(make))
    moves = Moves(shard)
    before = layout_of(make, 0, moved=False)
    moves.check(replace(before, epoch=7), before=before)
    fewer, more = (
        layout_of(make, 0, moved=True),
        replace(before, partitions={**before.partitions, 4: make.spec(4)}),
    )
    other = replace(before, partitions={**before.partitions, 1: make.spec(1, length=7)})
    for layout in (fewer, more, other):
        with pytest.raises(PreconditionError) as caught:
            moves.check(layout, before=before)
        assert caught.value.reason == "LAYOUT_CONFLICT"
    moves.leave(1, ORDER.partition_ids)
    moves.check(fewer, before=before)
    # a server that has lost its values accepts the map, because workers send their values
    Moves(Shard()).check(more, before=None)


def test_decision_that_arrives_while_the_note_is_in_progress_ends_the_freeze(
    make, tmp_path
) -> None:
    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, history):
            server, recorder = giver.server, ReportRecorder(giver)
            following = SilentFollower()
            await server.journal.append(None, lambda: server.journal.follow(following))
            await server.journal.append(None, lambda: server.journal.hold(position=0, confirmed=0))
            giver.sends_to(receiver)
            async with recorder.running() as mover:
                mover.ordered(ORDER)
                await until(lambda: LEAVING in following.heard)
                mover.settled(1, 1)  # the coordinator has decided without a report from this server
                await asyncio.sleep(0.01)
                assert server.shard.frozen
                server.journal.follow_no_more()
                await until(lambda: not server.shard.frozen)
                assert server.moves.settled == 1
                assert not recorder.reports
            await history.push(server, 3)
            assert history.has(server.shard)

    run(test())


def test_move_ordered_repeatedly_is_made_once(make, tmp_path) -> None:
    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, _):
            recorder, transfers = ReportRecorder(giver), 0
            giver.sends_to(receiver)
            transfer = giver.giver.transfer
            assert transfer is not None

            async def counted(order: MoveOrder, progress: Callable[[], None]) -> str:
                nonlocal transfers
                transfers += 1
                return await transfer(order, progress)

            giver.giver.transfer = counted
            async with recorder.running() as mover:
                mover.ordered(ORDER)
                await until(lambda: bool(giver.server.shard.frozen))
                mover.ordered(ORDER)
                # The mover ignores an order until it has finished with it: its report is being
                # sent. The coordinator then orders again.
                await until(lambda: bool(recorder.reports) and mover._giving is None)
                assert recorder.reports == [(1, "receiver", "")]
                mover.ordered(ORDER)  # the report was lost
                await until(lambda: len(recorder.reports) == 2)
                assert recorder.reports[1] == (1, "receiver", "")
                assert transfers == 1
                giver.of_coordinator = layout_of(make, 0, moved=True)
                mover.settled(1, 2)
                mover.ordered(ORDER)
                await until(lambda: giver.server.moves.settled == 1)
                await asyncio.sleep(0.01)
                assert len(recorder.reports) == 2
                assert giver.server.shard.partition_ids() == (0,)

    run(test())


def test_source_that_cannot_assemble_its_stream_reports_it_and_continues_to_serve(
    make, tmp_path, monkeypatch
) -> None:
    async def take(messages: AsyncIterator[bytes], context: Any) -> bytes:
        async for _ in messages:
            pass
        return b""

    def fails(partition_id: int) -> None:
        raise KeyError(partition_id)

    async def test() -> None:
        server = grpc.aio.server()
        handlers = {"TakePartitions": grpc.stream_unary_rpc_method_handler(take)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("shoal.v1.ParameterServer", handlers),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with two(tmp_path, make) as (giver, _, history):
            recorder = ReportRecorder(giver)
            monkeypatch.setattr(giver.server.shard, "frozen_image", fails)
            async with recorder.running() as mover:
                mover.ordered(replace(ORDER, receiver_address=f"127.0.0.1:{port}"))
                await until(lambda: bool(recorder.reports))
            assert recorder.reports[0][1] == ""
            assert "could not assemble the data" in recorder.reports[0][2]
            assert recorder.blames_itself
            await history.push(giver.server, 3)
        await server.stop(None)

    run(test())


def test_source_reports_whether_it_caused_a_rejected_move(make, tmp_path) -> None:
    """A giver reports whether it or the receiver failed. Otherwise the coordinator would exclude
    one receiver after another because of a giver with a full disk."""

    async def test() -> None:
        async with two(tmp_path, make) as (giver, receiver, history):
            recorder = ReportRecorder(giver)
            giver.sends_to(receiver)
            takes = giver.giver.transfer
            assert takes is not None
            async with recorder.running() as mover:
                with ExitStack() as disk:

                    async def taken_and_full(order: MoveOrder, progress: Callable[[], None]) -> str:
                        incarnation = await takes(order, progress)
                        disk.enter_context(largest_file(10))
                        return incarnation

                    giver.giver.transfer = taken_and_full
                    mover.ordered(ORDER)
                    await until(lambda: bool(recorder.reports))
                assert recorder.reports[0][:2] == (1, "")
                assert recorder.reports[0][2].startswith("JOURNAL_FAILED")
                assert recorder.blames_itself

                async def refuses(order: MoveOrder, progress: Callable[[], None]) -> str:
                    raise UnavailableError("its disk is full, too", reason="JOURNAL_FAILED")

                giver.giver.transfer = refuses
                mover.ordered(replace(ORDER, move=2))
                await until(lambda: len(recorder.reports) == 2)
                assert recorder.reports[1] == (2, "", "JOURNAL_FAILED: its disk is full, too")
                assert not recorder.blames_itself
            await history.push(giver.server, 3)
            assert history.has(giver.server.shard)

    run(test())
