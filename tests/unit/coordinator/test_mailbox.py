"""The messages that a slow stream finds in its mailbox."""

from __future__ import annotations

import asyncio

import pytest
from shoal_common.errors import UnavailableError
from shoal_coordinator.service.mailbox import Mailbox, Slot


def test_slow_reader_receives_the_latest_message_of_each_kind_in_order() -> None:
    async def test() -> list[bytes]:
        mailbox = Mailbox()
        mailbox.post(Slot.WELCOME, b"welcome")
        mailbox.post(Slot.PLACEMENT, b"generation 1")
        mailbox.post(Slot.DRAIN, b"drain")
        mailbox.post(Slot.PLACEMENT, b"standby")
        mailbox.post(Slot.PLACEMENT, b"generation 2")
        return [await anext(mailbox) for _ in range(3)]

    assert asyncio.run(test()) == [b"welcome", b"drain", b"generation 2"]


def test_a_waiting_reader_wakes_for_a_message_and_for_the_end() -> None:
    async def test() -> None:
        mailbox = Mailbox()
        reader = asyncio.create_task(anext(mailbox))
        await asyncio.sleep(0)
        mailbox.post(Slot.STOP, b"stop")
        assert await reader == b"stop"
        waiting = asyncio.create_task(anext(mailbox, None))
        await asyncio.sleep(0)
        mailbox.end()
        assert await waiting is None

    asyncio.run(test())


def test_first_error_ends_the_stream_before_anything_else() -> None:
    async def test() -> None:
        mailbox = Mailbox()
        mailbox.post(Slot.STOP, b"stop")
        mailbox.end(UnavailableError("first"))
        mailbox.end(UnavailableError("second"))
        with pytest.raises(UnavailableError, match="first"):
            await anext(mailbox)

    asyncio.run(test())
