"""A server's session with the coordinator, run on its own event loop."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest
from shoal_common.errors import UnavailableError
from shoal_common.formats.runs import Run
from shoal_common.rpc.channel import ChannelSettings
from shoal_ps_server.session import CoordinatorSession, Known, Place, Registration


class IgnoringListener:
    """A listener that ignores all events."""

    def known(self) -> Known:
        return Known()

    def welcomed(self, server_index: int, *, with_backups: bool, run: Run | None) -> None:
        pass

    def disconnected(self) -> None:
        pass

    def members(self, generation: int, member_ids: tuple[str, ...]) -> None:
        pass

    def placed(self, place: Place) -> None:
        pass

    def stored_bytes(self) -> int:
        return 0


@pytest.mark.parametrize("token", [None, "secret"])
def test_sessions_that_fail_leave_no_tasks_behind(cluster, token, caplog) -> None:
    cluster.coordinator.refusal = UnavailableError("not now")
    registration = Registration(
        job_id="job", server_id="server", address="here:1", metrics_address="", host="here", pid=1
    )

    async def three_attempts() -> None:
        session = CoordinatorSession(
            ChannelSettings(address=cluster.address, token=token), registration, IgnoringListener()
        )
        running = asyncio.create_task(session.run())
        for _ in range(3):
            await asyncio.to_thread(cluster.coordinator.tokens.get, timeout=30)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await session.close()
        gc.collect()

    with caplog.at_level(logging.ERROR, logger="asyncio"):
        asyncio.run(three_attempts())
        gc.collect()
    assert [record.getMessage() for record in caplog.records] == []
