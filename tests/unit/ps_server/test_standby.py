"""A backup applies and stores the stream from its primary."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_ps_server.replication import standby
from shoal_ps_server.replication.items import PARTITION, STATE, WHOLE, Item
from shoal_ps_server.replication.standby import Standby
from shoal_ps_server.settings import PsServerSettings
from shoal_ps_server.storage.directory import DataDirectory
from shoal_ps_server.storage.image import Members, ServerState, dumps, state_to_json
from shoal_ps_server.storage.snapshot import partition_to_bytes


def sent(make: Any, value: float) -> list[Item]:
    """Returns all items that a primary with one partition sends."""
    spec = make.spec(0)
    shard = make.shard(spec, values=torch.full((6,), value))
    state = ServerState(
        job_id="job",
        server_id="primary",
        layout=make.layout(spec),
        configuration=None,
        membership=Members(),
    )
    entry, data = partition_to_bytes(shard.image(0))
    return [
        Item(kind=STATE, payload=memoryview(dumps(state_to_json(state)).encode())),
        Item(kind=PARTITION, fields=entry, payload=memoryview(data)),
        Item(kind=WHOLE, fields={"batches": []}),
    ]


def test_changes_of_one_stream_are_on_disk_before_the_next_one_replaces_it(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, writing = threading.Event(), threading.Event()
    write_snapshot = standby.write_snapshot

    def slow(*arguments: Any) -> int:
        if not writing.is_set():
            writing.set()
            go.wait(30)
        return write_snapshot(*arguments)

    monkeypatch.setattr(standby, "write_snapshot", slow)
    data = tmp_path / "data"
    settings = PsServerSettings.load(
        coordinator="127.0.0.1:1",
        job="job",
        server_id="backup",
        data_dir=data,
        snapshot_interval="0s",
    )

    async def test() -> None:
        with DataDirectory(data) as directory:
            directory.recover(job_id="job", server_id="backup")
            backup = Standby(settings, directory)

            async def stream(value: float) -> standby._Stream:
                await backup._kept()  # called at the beginning of each stream
                stream = standby._Stream(pb.FollowBegin())
                for item in sent(make, value):
                    backup._take(item, stream)
                return stream

            await stream(1.0)
            await asyncio.to_thread(writing.wait)
            # the first stream has ended, and its snapshot is still being written
            second = asyncio.create_task(stream(2.0))
            await asyncio.sleep(0)
            go.set()
            await second
            await backup._kept()
            assert backup._copy is not None
            await backup._copy.close()
        with DataDirectory(data) as directory:
            recovered = directory.recover(job_id="job", server_id="backup")
            assert recovered.shard.image(0).values.tolist() == [2.0] * 6
            assert recovered.backup  # the server asks the coordinator before it serves

    asyncio.run(test())


def test_partly_cleared_directory_is_empty(make: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with DataDirectory(data) as directory:
        directory.recover(job_id="job", server_id="backup")
        directory.clear(job_id="job", server_id="backup")
    (data / "clearing").touch()
    (data / "journal.00000007").write_bytes(b"what is left of an older one")
    with DataDirectory(data) as directory:
        assert directory.recover(job_id="job", server_id="backup").layout is None
    assert not (data / "clearing").exists()
