"""A test's own folder in an object store, and the checkpoints in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest
import shoal
import torch
from shoal_worker.checkpoint.files import read_checkpoint, write_checkpoint
from shoal_worker.checkpoint.manifest import CheckpointInfo
from shoal_worker.checkpoint.remote import RemoteCheckpoints
from shoal_worker.object_storage import ObjectFolder
from shoal_worker.state.tree import Snapshot
from torch import nn

from tests.storage_server import BUCKET, StorageServer


@dataclass(frozen=True)
class Storage:
    """A running server, and one test's folder in it."""

    server: StorageServer
    bucket: str
    """URL of the bucket."""
    directory: Path
    """A directory of the test."""

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.directory.name

    @property
    def url(self) -> str:
        """URL of the folder."""
        return f"{self.bucket}/{self.name}"

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables with which a client uses the server."""
        return self.server.environment

    def set_faults(self, *rules: dict[str, Any]) -> None:
        """Replaces the server's rules, as `StorageServer.set_faults` does."""
        self.server.set_faults(*rules)

    def requests(self, method: str = "", text: str = "") -> list[str]:
        """Returns requests to the server, as `StorageServer.requests` does."""
        return self.server.requests(method, text)

    def folder(self, **options: Any) -> ObjectFolder:
        """The folder."""
        return ObjectFolder(self.url, **options)

    def remote(self, **options: Any) -> RemoteCheckpoints:
        """The checkpoints in the folder."""
        return RemoteCheckpoints(self.folder(**options))

    def local(self, step: int, *, elements: int = 1000, files: int = 1) -> Path:
        """Writes a checkpoint to the local disk and returns its path. elements: elements of each
        file's tensor."""
        names = ("model", "optimizer", "other")[:files]
        tensors = {name: {"weight": torch.arange(float(elements))} for name in names}
        return write_checkpoint(
            self.directory / "local",
            Snapshot.take({**tensors, "steps": step}),
            CheckpointInfo(step=step, strategy="ddp", world_size=1, generation=1, run="r"),
            fence=lambda: None,
            keep=99,
        )

    def upload(self, step: int, *, elements: int = 1000, **options: Any) -> Path:
        """Writes a checkpoint to the local disk, uploads it and returns its local path."""
        path = self.local(step, elements=elements)
        self.remote(**options).upload(path, keep=2, fence=lambda: None)
        return path

    def check_newest(self, step: int, path: Path) -> None:
        """The newest checkpoint is that of `step`, and equals the local one at `path`."""
        checkpoints = self.remote()
        assert checkpoints.newest() == f"step-{step}"
        fetched = read_checkpoint(checkpoints.fetch(f"step-{step}", self.directory / "other"))
        expected = read_checkpoint(path).state["model"]["weight"]
        assert torch.equal(fetched.state["model"]["weight"], expected)


def connected(
    scheme: str, server: StorageServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Storage:
    """Ends the faults of a server, sets the environment in which clients use it, and returns a
    test's folder."""
    server.set_faults()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SHOAL_STAGING_DIR", str(directory / "staging"))
    timeouts = {"connect_timeout": 120, "read_timeout": 120}  # instead of 5 and 15
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": timeouts})
    # or gcsfs looks for credentials at the metadata server of Google's machines, for seconds
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    return Storage(server, f"{scheme}://{BUCKET}", directory)


def train(where: str, epochs: int) -> bool:
    """A script: trains to the end of `epochs` and saves after each. Returns whether it resumed."""
    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    model, optimizer = shoal.as_distributed(
        net, torch.optim.AdamW(net.parameters(), 1e-2), strategy="fsdp"
    )
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(torch.ones(8, 8)), global_batch_size=4
    )
    resumed = shoal.resume(where)
    for _ in loader.epochs(epochs):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        shoal.save_checkpoint(where)
    shoal.shutdown()
    return resumed
