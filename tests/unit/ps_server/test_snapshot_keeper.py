"""Snapshots are written one after another, even if the caller of the first one is no longer waiting
for it."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry
from shoal_common.tasks import end_tasks
from shoal_ps_server.metrics import Metrics
from shoal_ps_server.storage.changes import Changes
from shoal_ps_server.storage.directory import DataDirectory
from shoal_ps_server.storage.image import Members, ServerState
from shoal_ps_server.storage.moves import Moves
from shoal_ps_server.storage.snapshot_keeper import SnapshotKeeper


def test_the_last_snapshot_waits_for_one_that_was_cancelled_halfway(make, tmp_path) -> None:
    """The last snapshot waits for an earlier one that was cancelled, as when a server is stopped
    while it writes its periodic snapshot."""
    spec, directory = make.spec(), DataDirectory(tmp_path)
    shard = make.shard(spec)
    # The first write blocks when it opens this pipe, until the test reads from it. Then it fails,
    # because a pipe cannot be synced.
    blocking_pipe = Path(f"{directory.snapshot}.{os.getpid()}.tmp")
    os.mkfifo(blocking_pipe)
    others = executor_threads()

    def writers() -> int:
        """Returns the number of threads in the loop's executor, which is the largest number of
        concurrent writes so far."""
        return len(executor_threads() - others)

    async def test() -> None:
        changes = Changes(shard=shard, layout=lambda: make.layout(spec), members=Members)
        keeper = SnapshotKeeper(
            directory=directory,
            shard=shard,
            moves=Moves(shard),
            state=lambda: _state(make.layout(spec)),
            changes=changes,
            metrics=_metrics(),
            journal_limit=1 << 30,
        )
        first = asyncio.create_task(keeper.write())
        while not writers():
            await asyncio.sleep(0)
        await end_tasks([first])
        shard.push(make.upload(torch.ones(6), spec))
        last = asyncio.create_task(keeper.write())
        for _ in range(100):  # iterations of the event loop in which it could begin
            await asyncio.sleep(0)
        writing = writers()
        with blocking_pipe.open("rb") as pipe:
            pipe.read()
        await last
        assert writing == 1

    async def in_time() -> None:
        async with asyncio.timeout(30):
            await test()

    with directory:
        asyncio.run(in_time())
        found = directory.read(job_id="job", server_id="server")
    assert found is not None
    assert found.partitions[0].version == 2


def executor_threads() -> set[threading.Thread]:
    """Returns the threads in executors of event loops, including loops of other tests."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("asyncio_")}


def _metrics() -> Metrics:
    return Metrics(CollectorRegistry())


def _state(layout) -> ServerState:
    return ServerState(
        job_id="job",
        server_id="server",
        layout=layout,
        configuration=None,
        membership=Members(generation=1),
    )
