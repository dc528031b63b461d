"""Seeded schedules for the journal: pushes of whole partitions and of some of their pieces, random
disk failures, cancelled callers, and snapshots and settings in between. The process may be killed
at any moment. The state recovered from each directory is compared with the acknowledged and the
refused pushes."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_common.errors import ShoalError, UnavailableError
from shoal_ps_server.settings import Fsync
from shoal_ps_server.shard.shard import Shard
from shoal_ps_server.storage.directory import DataDirectory
from shoal_ps_server.storage.image import Members
from shoal_ps_server.storage.snapshot import write_snapshot

from tests.unit.ps_server.journaled import JOB, SERVER, opened, same, state_of

MEMBERS = "abc"
PARTITIONS = 3
PIECES = (("a", 1), ("b", 3), ("c", 2))
"""Names of the pieces of each partition and their numbers of elements."""
PUSHES = 40
"""Number of pushes of each member in each incarnation of the server."""


@dataclass(kw_only=True)
class Disk:
    """A disk with random failures. A write may be short, or fail after a part of its bytes. A sync
    may fail. The process may be killed between any two of them."""

    generator: random.Random
    killed: Callable[[], None]
    """Called at the time of a kill, while nothing else writes: the directory is as the kill would
    leave it."""
    failure: float = 0.0
    kill: float = 0.0
    due: int = 0
    """Number of kills that happen at the next writes and syncs. It guarantees a minimum on slow
    machines, which write fewer times."""

    def __post_init__(self) -> None:
        self._write, self._sync = os.pwritev, os.fdatasync
        self._snapshots = threading.Lock()

    def pwritev(self, descriptor: int, buffers: list[memoryview], at: int) -> int:
        if self.generator.random() < self.failure:
            self._write(
                descriptor, [memoryview(b"".join(buffers))[: self.generator.randrange(1, 400)]], at
            )
            raise OSError(errno.ENOSPC, "No space left on device")
        if len(buffers[0]) > 1 and self.generator.random() < 0.2:
            written = self._write(descriptor, [buffers[0][: len(buffers[0]) // 2]], at)
        else:
            written = self._write(descriptor, buffers, at)
        self._maybe_kill()
        return written

    def fdatasync(self, descriptor: int) -> None:
        if self.generator.random() < self.failure:
            raise OSError(errno.EIO, "Input/output error")
        self._sync(descriptor)
        self._maybe_kill()

    def exclusive(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def locked(*arguments: Any) -> Any:
            with self._snapshots:
                return call(*arguments)

        return locked

    def _maybe_kill(self) -> None:
        if self.generator.random() < self.kill or (self.kill and self.due):
            self.due = max(0, self.due - 1)
            with self._snapshots:
                self.killed()


@contextmanager
def on(disk: Disk) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "pwritev", disk.pwritev)
        patched.setattr(os, "fdatasync", disk.fdatasync)
        patched.setattr(
            "shoal_ps_server.storage.snapshot_keeper.write_snapshot", disk.exclusive(write_snapshot)
        )
        patched.setattr(
            DataDirectory,
            "forget_journal_before",
            disk.exclusive(DataDirectory.forget_journal_before),
        )
        yield


@dataclass(frozen=True, kw_only=True)
class Kill:
    """The files after a kill, and what the members had received at that moment."""

    directory: Path
    acknowledged: dict[tuple[int, str], int]
    sent: dict[tuple[int, str], int]


class History:
    """The pushes of each member to each partition, and their answers."""

    def __init__(self) -> None:
        self.acknowledged: dict[tuple[int, str], int] = {}
        """The last acknowledged sequence number. All earlier ones were acknowledged, too."""
        self.sent: dict[tuple[int, str], int] = {}
        """The last sequence number that may have been applied: it was sent and neither refused nor
        answered."""

    @staticmethod
    def gradient(partition: int, member: str, sequence: int) -> tuple[float, tuple[int, ...]]:
        """Returns the gradient of each element and the pieces without a gradient. All sums are
        exact in float32 and identify their summands."""
        absent = ((), (0,), (1,), (0, 2))[(sequence + partition) % 4]
        return float(sequence * 4 + MEMBERS.index(member) + partition), absent

    @staticmethod
    def check(
        shard: Shard,
        acknowledged: Mapping[tuple[int, str], int],
        sent: Mapping[tuple[int, str], int],
    ) -> None:
        for partition in range(PARTITIONS):
            image = shard.image(partition)
            assert image is not None
            total = [0.0] * len(PIECES)
            for member in MEMBERS:
                found = image.sequences.get(member, 0)
                last = acknowledged.get((partition, member), 0)
                assert last <= found <= max(last, sent.get((partition, member), 0)), (
                    partition,
                    member,
                )
                for sequence in range(1, found + 1):
                    gradient, absent = History.gradient(partition, member, sequence)
                    for piece in set(range(len(PIECES))) - set(absent):
                        total[piece] += gradient
            assert image.version == 1 + sum(image.sequences.values())
            assert image.values.tolist() == [
                -sums
                for sums, (_, length) in zip(total, PIECES, strict=True)
                for _ in range(length)
            ]


@pytest.mark.parametrize("fsync", list(Fsync))
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(3, 6))]
)
def test_acknowledged_pushes_are_present_once_and_refused_ones_absent_whatever_the_disk_does(
    make, tmp_path, seed, fsync
) -> None:
    generator = random.Random(seed)
    data = tmp_path / "data"
    specs = [make.packed(number, *PIECES) for number in range(PARTITIONS)]
    history = History()
    kills: list[Kill] = []

    def killed() -> None:
        if len(kills) < 40 and (data / "journal.id").exists():
            acknowledged, sent = dict(history.acknowledged), dict(history.sent)
            directory = tmp_path / f"killed-{len(kills)}"
            shutil.copytree(data, directory)
            kills.append(Kill(directory=directory, acknowledged=acknowledged, sent=sent))

    disk = Disk(generator=generator, killed=killed)

    async def train(server: Any, member: str) -> None:
        for _ in range(PUSHES):
            partition = generator.randrange(PARTITIONS)
            key = (partition, member)
            sequence = history.acknowledged.get(key, 0) + 1
            gradient, absent = history.gradient(partition, member, sequence)
            values = torch.full((specs[partition].length_without(absent),), gradient)
            history.sent[key] = sequence
            upload = make.upload(
                values, specs[partition], member=member, sequence=sequence, absent=absent
            )
            push = asyncio.create_task(server.push(upload))
            if generator.random() < 0.1:
                await asyncio.sleep(0)
                push.cancel()
                await asyncio.wait([push])
                if push.cancelled():
                    continue  # the caller has no answer and sends the push again
            try:
                await push
            except UnavailableError:
                # The push was refused together with all unanswered pushes before it. Only failures
                # of the journal guarantee this.
                history.sent[key] = server.shard._partitions[partition].settled.sequences.get(
                    member, 0
                )
            else:
                history.acknowledged[key] = sequence

    async def disturb(server: Any) -> None:
        for _ in range(PUSHES // 4):
            await asyncio.sleep(generator.uniform(0.0, 0.02))
            with suppress(ShoalError):
                if generator.random() < 0.5:
                    await server.snapshots.write()
                else:
                    server.members = Members(
                        generation=server.members.generation + 1, members=frozenset(MEMBERS)
                    )
                    server.changes.members_changed()
                    await server.configure(make.sgd(lr=1.0))

    async def life(failures: float) -> None:
        with on(disk):
            async with opened(data, fsync) as server:
                if server.layout is None:
                    server.members = Members(generation=1, members=frozenset(MEMBERS))
                    server.adopt(make.layout(*specs))
                    await server.configure(make.sgd(lr=1.0))
                    for spec in specs:
                        await server.initialize(
                            make.upload(torch.zeros(6), spec, sequence=0, base_version=0)
                        )
                history.check(server.shard, history.acknowledged, history.sent)
                # pushes without an answer may have been applied
                for partition, member in list(history.sent):
                    found = server.shard.image(partition).sequences.get(member, 0)
                    history.acknowledged[partition, member] = history.sent[partition, member] = (
                        found
                    )
                disk.failure, disk.kill, disk.due = failures, 0.05, 2
                await asyncio.gather(
                    *(train(server, member) for member in MEMBERS), disturb(server)
                )
                disk.failure = disk.kill = 0.0
                assert not server.failures
            found = state_of(server.shard)
        with DataDirectory(data) as directory:
            assert same(state_of(directory.recover(job_id=JOB, server_id=SERVER).shard), found)

    for failures in (0.0, 0.1, 0.3):
        asyncio.run(life(failures))
    assert sum(history.acknowledged.values()) > 20
    assert len(kills) >= 6
    for kill in kills:
        with DataDirectory(kill.directory) as directory:
            History.check(
                directory.recover(job_id=JOB, server_id=SERVER).shard, kill.acknowledged, kill.sent
            )
