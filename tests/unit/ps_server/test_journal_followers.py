"""A follower of a journal receives each change once and in order. Changes wait for it if they have
to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from shoal_common.errors import UnavailableError
from shoal_ps_server.storage.record import Record
from shoal_ps_server.storage.recovery import MEMBERS, PUSH

from tests.unit.ps_server.journaled import (
    Journaled,
    begun,
    largest_file,
    opened,
    run,
    same,
    state_of,
)


class Following:
    """The records that a backup receives."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        """The event ("made" or "written") and the sequence number of its push."""

    def made(self, record: Record) -> None:
        self._hear("made", record)

    def written(self, record: Record) -> int:
        self._hear("written", record)
        return len(self.heard)

    def _hear(self, how: str, record: Record) -> None:
        if record.kind != MEMBERS:
            assert record.kind == PUSH
            self.heard.append((how, int(record.fields["sequence"])))


async def followed(server: Journaled, make: Any) -> Following:
    """Attaches a follower that receives all later changes."""
    await begun(server, make)
    following = Following()
    await server.journal.append(None, lambda: server.journal.follow(following))
    return following


async def hold(server: Journaled, following: Following) -> None:
    """Makes later changes wait for the follower."""
    heard = len(following.heard)
    await server.journal.append(None, lambda: server.journal.hold(position=heard, confirmed=heard))


def pushes(server: Journaled, make: Any, *sequences: int) -> list[asyncio.Task[Any]]:
    uploads = (
        make.upload(torch.full((6,), float(step)), make.spec(0), sequence=step)
        for step in sequences
    )
    return [asyncio.create_task(server.push(upload)) for upload in uploads]


async def until_written(following: Following, sequence: int) -> None:
    while ("written", sequence) not in following.heard:
        await asyncio.sleep(0)


def version(server: Journaled) -> int:
    return server.shard.summary().versions[0]


def test_follower_receives_each_change_once_and_in_order(make, tmp_path) -> None:
    async def test() -> None:
        async with opened(tmp_path / "data") as server:
            following = await followed(server, make)
            first = pushes(server, make, 1, 2, 3, 4)
            await server.journal.append(
                None,
                lambda: server.journal.hold(
                    position=len(following.heard), confirmed=len(following.heard)
                ),
            )
            second = pushes(server, make, 5, 6)
            await until_written(following, 6)
            server.journal.confirm(len(following.heard))
            await asyncio.gather(*first, *second)
            server.journal.follow_no_more()
            await asyncio.gather(*pushes(server, make, 7))
            assert [sequence for _, sequence in following.heard] == [1, 2, 3, 4, 5, 6]

    run(test())


def test_change_takes_effect_once_the_follower_has_it(make, tmp_path) -> None:
    async def test() -> None:
        async with opened(tmp_path / "data") as server:
            following = await followed(server, make)
            await hold(server, following)
            tasks = pushes(server, make, 1, 2)
            await until_written(following, 2)
            assert version(server) == 1
            assert not any(task.done() for task in tasks)
            server.journal.confirm(1)
            await tasks[0]
            assert version(server) == 2
            server.journal.confirm(2)
            await tasks[1]
            assert version(server) == 3

    run(test())


def test_waiting_changes_continue_when_no_follower_is_left(make, tmp_path) -> None:
    async def test() -> None:
        async with opened(tmp_path / "data") as server:
            following = await followed(server, make)
            await hold(server, following)
            tasks = pushes(server, make, 1, 2)
            await until_written(following, 2)
            server.journal.follow_no_more()
            await asyncio.gather(*tasks)
            assert version(server) == 3

    run(test())


def test_changes_refused_by_the_disk_behind_waiting_ones_can_be_repeated_and_count_once(
    make, tmp_path
) -> None:
    async def test() -> None:
        async with opened(tmp_path / "data") as server:
            following = await followed(server, make)
            await hold(server, following)
            waiting = pushes(server, make, 1)
            await until_written(following, 1)
            with largest_file(10):
                refused = pushes(server, make, 2)
                await asyncio.wait(refused, timeout=0.2)
                assert not refused[0].done()  # an earlier change has not taken effect yet
                server.journal.confirm(1)
                await waiting[0]
                with pytest.raises(UnavailableError) as caught:
                    await refused[0]
            assert caught.value.reason == "JOURNAL_FAILED"
            assert following.heard == [("written", 1)]
            again = pushes(server, make, 2)
            await until_written(following, 2)
            server.journal.confirm(2)
            assert not (await again[0]).duplicate
            assert version(server) == 3
            assert server.shard.image(0).sequences == {"a": 2}

    run(test())


def test_failing_journal_reports_waiting_changes_and_the_next_start_has_them(
    make, tmp_path
) -> None:
    async def test() -> dict[int, Any]:
        async with opened(tmp_path / "data") as server:
            following = await followed(server, make)
            await hold(server, following)
            tasks = pushes(server, make, 1)
            await until_written(following, 1)
            await server.changes.close()  # does not wait for a follower
            with pytest.raises(UnavailableError):
                await tasks[0]
            assert version(server) == 1
            return state_of(server.shard)

    before = run(test())

    async def again() -> None:
        async with opened(tmp_path / "data") as server:
            assert version(server) == 2
            assert not same(before, state_of(server.shard))
            assert (await asyncio.gather(*pushes(server, make, 1)))[0].duplicate

    run(again())
