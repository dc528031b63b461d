"""Upload streams share a server fairly: stalled streams are ended, and all streams together are
limited to a number of partitions in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import numpy as np
import pytest
from shoal_common.errors import DeadlineError
from shoal_common.formats.wire import encode_push_chunk
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_ps_server.consistency.clocks import Clocks, Consistency, ConsistencyMode
from shoal_ps_server.consistency.fence import Fence
from shoal_ps_server.consistency.membership import Membership
from shoal_ps_server.service.intake import Intake
from shoal_ps_server.service.requests import UploadKind
from shoal_ps_server.service.staging import SHARE, Staging
from shoal_ps_server.service.streams import parts_of
from shoal_ps_server.storage.changes import Changes
from shoal_ps_server.storage.image import Members


@pytest.fixture
def made(make):
    """Returns `make_intake(idle)`, which returns an intake and its shard. The shard has one
    partition of 6 floats with values, and members a and b are in generation 1. `refusal` is the
    error that a request for the shard map raises."""

    def make_intake(
        idle: timedelta = timedelta(seconds=30),
        refusal: DeadlineError | None = None,
        staging: Staging | None = None,
        mode: ConsistencyMode = ConsistencyMode.ASP,
    ):
        layout = make.layout()
        shard = make.shard()
        membership = Membership(fence=Fence(), clocks=Clocks())
        membership.consistency = Consistency(mode=mode)
        membership.learn(1, ["a", "b"])

        async def layout_of_epoch(epoch: int):
            if refusal is not None:
                raise refusal
            return layout

        intake = Intake(
            job_id="job",
            changes=Changes(shard=shard, layout=lambda: layout, members=Members),
            membership=membership,
            layout_of_epoch=layout_of_epoch,
            applied=lambda *_: None,
            waited=lambda _: None,
            idle_limit=idle,
            staging=staging,
        )
        return intake, shard

    return make_intake


def chunks(member: str) -> list[bytes]:
    """Returns one push in two chunks."""
    header = pb.PushHeader(
        job_id="job",
        member_id=member,
        generation=1,
        shard_map_epoch=1,
        clock=1,
        sequence=1,
        base_version=1,
        dtype=pb.DTYPE_FLOAT32,
        codec=pb.CODEC_RAW,
        length=6,
        payload_bytes=24,
    )
    payload = memoryview(np.ones(6, np.float32)).cast("B")
    return [encode_push_chunk((header, payload[:8])), encode_push_chunk((None, payload[8:]))]


def test_silent_stream_is_ended_and_its_place_released(made) -> None:
    async def scenario() -> None:
        intake, shard = made(timedelta(milliseconds=50), staging=Staging(nbytes=24))

        async def silent() -> AsyncIterator[bytes]:
            yield chunks("a")[0]
            await asyncio.Event().wait()

        async def whole() -> AsyncIterator[bytes]:
            for chunk in chunks("b"):
                yield chunk

        with pytest.raises(DeadlineError) as caught:
            await intake.receive(parts_of(silent()), UploadKind.PUSH)
        assert caught.value.reason == "STREAM_IDLE"
        assert shard.version(0) == 1
        assert [
            each.version
            for each in (await intake.receive(parts_of(whole()), UploadKind.PUSH)).results
        ] == [2]

    asyncio.run(scenario())


def test_deadline_other_than_the_streams_is_reported_unchanged(made) -> None:
    async def scenario() -> None:
        intake, _ = made(refusal=DeadlineError("GetShardMap took too long"))

        async def messages() -> AsyncIterator[bytes]:
            yield chunks("a")[0]

        with pytest.raises(DeadlineError, match="GetShardMap took too long"):
            await intake.receive(parts_of(messages()), UploadKind.PUSH)

    asyncio.run(scenario())


def test_a_stream_waits_when_too_much_is_being_received(made) -> None:
    async def scenario() -> None:
        intake, shard = made(staging=Staging(nbytes=24))
        go_on = asyncio.Event()
        order: list[str] = []

        async def stream(member: str, *, holds: bool) -> AsyncIterator[bytes]:
            first, second = chunks(member)
            yield first
            if holds:
                await go_on.wait()
            yield second

        async def push(member: str, *, holds: bool = False) -> None:
            await intake.receive(parts_of(stream(member, holds=holds)), UploadKind.PUSH)
            order.append(member)

        slow = asyncio.create_task(push("a", holds=True))
        await asyncio.sleep(0)
        quick = asyncio.create_task(push("b"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not order
        go_on.set()
        await asyncio.gather(slow, quick)
        assert order == ["a", "b"]
        assert shard.version(0) == 3

    asyncio.run(scenario())


def test_stalled_member_occupies_only_its_own_share(made) -> None:
    """A member with 64 stalled streams uses only its own share of the memory, and another member's
    push succeeds."""

    async def scenario() -> None:
        staging = Staging(nbytes=24 * SHARE * 2)
        intake, _ = made(staging=staging)

        async def stalled() -> AsyncIterator[bytes]:
            yield chunks("a")[0]
            await asyncio.Event().wait()

        async def whole() -> AsyncIterator[bytes]:
            for chunk in chunks("b"):
                yield chunk

        streams = [
            asyncio.create_task(intake.receive(parts_of(stalled()), UploadKind.PUSH))
            for _ in range(64)
        ]
        for _ in range(20):
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            assert [
                each.version
                for each in (await intake.receive(parts_of(whole()), UploadKind.PUSH)).results
            ] == [2]
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        async with asyncio.timeout(30):
            (await staging.take("a", 48))()  # its whole share is available again

    asyncio.run(scenario())


def test_two_bsp_pushes_that_wait_for_each_other_succeed_with_memory_for_one(made) -> None:
    """Two pushes that wait for each other under bsp both succeed, although there is memory for only
    one."""

    async def scenario() -> None:
        intake, shard = made(staging=Staging(nbytes=24), mode=ConsistencyMode.BSP)

        async def whole(member: str) -> AsyncIterator[bytes]:
            for chunk in chunks(member):
                yield chunk

        async with asyncio.timeout(30):
            await asyncio.gather(
                *(intake.receive(parts_of(whole(member)), UploadKind.PUSH) for member in ("a", "b"))
            )
        assert shard.version(0) == 3

    asyncio.run(scenario())


def test_known_push_does_not_wait(made) -> None:
    """Under bsp, a repeated push is acknowledged without waiting for other members to read the
    values."""

    async def scenario() -> None:
        intake, shard = made(mode=ConsistencyMode.BSP)

        async def whole(member: str) -> AsyncIterator[bytes]:
            for chunk in chunks(member):
                yield chunk

        async with asyncio.timeout(2):
            await asyncio.gather(
                *(intake.receive(parts_of(whole(member)), UploadKind.PUSH) for member in ("a", "b"))
            )
            assert [
                each.duplicate
                for each in (await intake.receive(parts_of(whole("a")), UploadKind.PUSH)).results
            ] == [True]
        assert shard.version(0) == 3

    asyncio.run(scenario())
