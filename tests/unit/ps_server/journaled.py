"""A server's state with its journal, without RPCs: tests open, change, kill and recover it."""

from __future__ import annotations

import asyncio
import resource
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from shoal_ps_server.configuration import Configuration
from shoal_ps_server.consistency.clocks import Consistency
from shoal_ps_server.metrics import Metrics
from shoal_ps_server.settings import Fsync
from shoal_ps_server.shard.layout import Layout
from shoal_ps_server.shard.optimizer import OptimizerSettings, optimizer_settings
from shoal_ps_server.shard.shard import Outcome, Shard
from shoal_ps_server.storage.changes import Changes
from shoal_ps_server.storage.directory import DataDirectory
from shoal_ps_server.storage.image import Members, ServerState
from shoal_ps_server.storage.journal import Journal
from shoal_ps_server.storage.snapshot_keeper import SnapshotKeeper

JOB, SERVER = "job", "server"
ADAMW = {"lr": 0.1, "weight_decay": 0.01}


class Journaled:
    """The parts of a server that the journal records: shard, layout, configuration and members."""

    def __init__(self, directory: DataDirectory, fsync: Fsync) -> None:
        recovered = directory.recover(job_id=JOB, server_id=SERVER)
        self.shard: Shard = recovered.shard
        self.layout: Layout | None = recovered.layout
        self.configuration: Configuration | None = recovered.configuration
        self.members = recovered.members
        self.moves = recovered.moves
        self.failures: list[BaseException] = []
        self.changes = Changes(
            shard=self.shard, layout=lambda: self.layout, members=lambda: self.members
        )
        self.journal = Journal(
            directory.segments,
            number=recovered.next_file,
            previous_end=recovered.last_end,
            fsync=fsync,
            failed=self.failures.append,
        )
        self.changes.write_to(self.journal)
        self.snapshots = SnapshotKeeper(
            directory=directory,
            shard=self.shard,
            moves=self.moves,
            state=self._state,
            changes=self.changes,
            metrics=Metrics(CollectorRegistry()),
            journal_limit=1 << 30,
        )

    def adopt(self, layout: Layout) -> None:
        self.shard.adopt(layout)
        self.layout = layout

    async def configure(
        self, optimizer: OptimizerSettings, consistency: Consistency | None = None
    ) -> None:
        before = self.configuration
        configuration = (
            Configuration(
                configured=optimizer, optimizer=optimizer, consistency=consistency or Consistency()
            )
            if before is None
            else replace(before, optimizer=optimizer, revision=before.revision + 1)
        )

        def effect() -> None:
            self.configuration = configuration
            self.shard.configure(optimizer)

        await asyncio.shield(self.changes.configure(configuration, effect))

    async def push(self, upload: Any) -> Outcome:
        # shielded as in an upload stream, whose caller may be cancelled
        return await asyncio.shield(await self.changes.push(upload))

    async def initialize(self, upload: Any) -> Outcome:
        return await asyncio.shield(await self.changes.initialize(upload))

    def _state(self) -> ServerState | None:
        if self.layout is None:
            return None
        return ServerState(
            job_id=JOB,
            server_id=SERVER,
            layout=self.layout,
            configuration=self.configuration,
            membership=self.members,
            settled=self.moves.settled,
            leaving=self.moves.leaving,
        )


@asynccontextmanager
async def opened(path: Path, fsync: Fsync = Fsync.GROUP) -> AsyncIterator[Journaled]:
    """Opens a data directory: recovers the server, which then writes its journal. Leaving the
    context writes nothing more, as if the process had been killed with SIGKILL."""
    with DataDirectory(path) as directory:
        server = Journaled(directory, fsync)
        try:
            async with asyncio.timeout(60):
                yield server
        finally:
            await server.changes.close()


def state_of(shard: Shard) -> dict[int, Any]:
    """Returns the complete state of a shard, for comparison with `same`."""
    return {number: shard.image(number) for number in shard.partition_ids()}


def same(left: dict[int, Any], right: dict[int, Any]) -> bool:
    """Returns whether two states are bitwise equal."""
    if left.keys() != right.keys():
        return False
    for one, other in zip(left.values(), right.values(), strict=True):
        if (one is None) != (other is None):
            return False
        if one is None:
            continue
        if (one.version, one.sequences, one.batches, one.left, one.state().keys()) != (
            other.version,
            other.sequences,
            other.batches,
            other.left,
            other.state().keys(),
        ):
            return False
        if not torch.equal(one.values, other.values) or not all(
            torch.equal(one.state()[name], other.state()[name]) for name in one.state()
        ):
            return False
        if (one.rows is None) != (other.rows is None) or (
            one.rows is not None and arrays_of(one.rows) != arrays_of(other.rows)
        ):
            return False
    return True


def arrays_of(rows: Any) -> dict[str, tuple[Any, ...]]:
    """Returns a bucket's rows in a form that compares bitwise."""
    arrays = {"ids": rows.ids, "values": rows.values, "updated_at": rows.updated_at, **rows.state}
    return {name: (array.shape, array.dtype, array.tobytes()) for name, array in arrays.items()}


def run(test: Any) -> Any:
    return asyncio.run(test)


def recovered(path: Path) -> dict[int, Any]:
    """Returns the state that a server recovers from a copy of the directory."""
    copy = path.with_name(f"{path.name}.copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy)
    with DataDirectory(copy) as directory:
        return state_of(directory.recover(job_id=JOB, server_id=SERVER).shard)


async def begun(server: Journaled, make: Any, consistency: Consistency | None = None) -> None:
    """Sets up a server with two partitions that have values, one of them of bfloat16, AdamW, and
    three members."""
    server.members = Members(generation=1, members=frozenset("abc"))
    specs = (make.spec(0), make.spec(3, length=4, dtype="bfloat16", tensor="bias"))
    server.adopt(make.layout(*specs))
    await server.configure(optimizer_settings(name="adamw", hyperparameters=ADAMW), consistency)
    for spec in specs:
        await server.initialize(
            make.upload(torch.arange(spec.length), spec, sequence=0, base_version=0)
        )


def file(path: Path) -> Path:
    """Returns the only file of the journal."""
    (found,) = path.glob("journal.0*")
    return found


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Limits the size of all files that this process writes. To a journal, this is a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
