"""Uploads run in the background of training: the backlog is visible and bounded, and failures do
not stop the run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from shoal_common.errors import DeadlineError, PermissionDeniedError, UnavailableError
from shoal_worker.checkpoint.files import read_checkpoint, write_checkpoint
from shoal_worker.checkpoint.manifest import NAME, CheckpointInfo
from shoal_worker.checkpoint.uploads import Uploads, is_uploaded
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.state.tree import Snapshot

URL = "memory://bucket/run"
LONG = timedelta(seconds=60)


class Storage:
    """fsspec's storage in memory, whose uploads wait for `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: Any = fsspec.filesystem("memory")
        self.files.store.clear()
        self.open, self.entered = threading.Event(), threading.Event()
        self.open.set()
        self.error: Exception | None = None
        plain = type(self.files).put_file
        storage = self

        def put_file(self: Any, *args: Any, **kw: Any) -> Any:
            storage.entered.set()
            assert storage.open.wait(60)
            if storage.error is not None:
                raise storage.error
            return plain(self, *args, **kw)

        monkeypatch.setattr(type(self.files), "put_file", put_file)

    def steps(self) -> list[str]:
        keys = (key.removeprefix("/bucket/run/") for key in self.files.store)
        return sorted(key.partition("/")[0] for key in keys if key.endswith(f"/{NAME}"))


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    made = Storage(monkeypatch)
    yield made
    made.open.set()
    made.files.store.clear()


class Run:
    """A run that saves to a directory."""

    def __init__(self, directory: Path, *, patience_s: float = 60) -> None:
        self.directory = directory
        self.metrics = WorkerMetrics()
        self.uploads = Uploads(
            URL, directory, metrics=self.metrics, patience=timedelta(seconds=patience_s)
        )

    def save(self, step: int, *, keep: int = 2) -> Path:
        path = write_checkpoint(
            self.directory,
            Snapshot.take({"model": {"weight": torch.ones(1000)}, "steps": step}),
            CheckpointInfo(step=step, strategy="ddp", world_size=1, generation=1, run="r"),
            fence=lambda: None,
            keep=keep,
        )
        self.uploads.changed(keep=keep, fence=lambda: None)
        return path

    def value(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(f"shoal_worker_{name}", labels)
        assert value is not None, name
        return value


def test_a_save_does_not_wait_for_the_upload_and_the_end_does(
    storage: Storage, tmp_path: Path
) -> None:
    run = Run(tmp_path)
    storage.open.clear()
    run.save(1)
    assert run.uploads.backlog().checkpoints == 1
    assert run.uploads.backlog().nbytes > 4000
    with pytest.raises(DeadlineError, match=r"1 checkpoint, 0\.0 MB are left in"):
        run.uploads.wait(timedelta(0))
    storage.open.set()
    run.uploads.wait(LONG)
    assert storage.steps() == ["step-1"]
    assert run.uploads.backlog().checkpoints == 0


def test_the_backlog_is_bounded_by_keep(storage: Storage, tmp_path: Path) -> None:
    """The upload in progress ends although a save has removed its checkpoint; those that nobody
    would keep are not uploaded."""
    run = Run(tmp_path)
    storage.open.clear()
    run.save(1)
    assert storage.entered.wait(60)
    for step in range(2, 8):
        run.save(step)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-6", "step-7"]
    assert run.uploads.backlog().checkpoints == 2
    storage.open.set()
    run.uploads.wait(LONG)
    assert storage.steps() == ["step-6", "step-7"]
    assert run.value("uploads_total", outcome="written") == 3
    assert [path.name for path in tmp_path.glob(".*")] == [".uploaded"]
    assert is_uploaded(tmp_path / "step-7")
    assert not is_uploaded(tmp_path / "step-6")


def test_the_metrics_show_the_backlog(storage: Storage, tmp_path: Path) -> None:
    run = Run(tmp_path)
    storage.open.clear()
    path = run.save(1)
    size = sum(file.stat().st_size for file in path.iterdir())
    assert run.value("upload_backlog_checkpoints") == 1
    assert run.value("upload_backlog_bytes") == size
    storage.open.set()
    run.uploads.wait(LONG)
    run.save(2)
    run.uploads.wait(LONG)
    assert run.value("uploaded_bytes_total") == 2 * (path / "model.safetensors").stat().st_size
    assert run.value("upload_seconds_count") == 2


def test_a_failed_upload_is_repeated_after_the_next_save(
    storage: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, patience_s=0.01)
    storage.error = OSError("503")
    with caplog.at_level(logging.WARNING):
        path = run.save(1)
        with pytest.raises(UnavailableError, match=r"503.*remain in") as raised:
            run.uploads.wait(LONG)
    assert raised.value.reason == "CHECKPOINT_NOT_UPLOADED"
    assert "step-1 was not uploaded to memory://bucket/run, and remains in" in caplog.text
    read_checkpoint(path)
    run.uploads.check()  # training continues
    storage.error = None
    run.save(2)
    run.uploads.wait(LONG)
    assert storage.steps() == ["step-1", "step-2"]


def test_transient_storage_failure_fails_no_upload(
    storage: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    storage.error = TimeoutError("no answer")
    run.save(1)
    while "failed and is repeated: TimeoutError: no answer" not in caplog.text:
        assert storage.entered.wait(60)
    storage.error = None
    run.uploads.wait(LONG)
    assert storage.steps() == ["step-1"]
    assert run.value("uploads_total", outcome="failed") == 0


def test_a_refused_upload_is_raised_once(storage: Storage, tmp_path: Path) -> None:
    run = Run(tmp_path)
    storage.error = PermissionError("not for you")
    run.save(1)
    with pytest.raises(UnavailableError, match="check the credentials"):
        run.uploads.wait(LONG)
    with pytest.raises(PermissionDeniedError, match="not for you"):
        run.uploads.check()
    run.uploads.check()


def test_checkpoint_left_by_a_dead_process_is_uploaded_too(
    storage: Storage, tmp_path: Path
) -> None:
    dead = Run(tmp_path, patience_s=0.01)
    storage.error = OSError("gone")
    dead.save(1)
    with pytest.raises(UnavailableError):
        dead.uploads.wait(LONG)
    storage.error = None
    run = Run(tmp_path)
    run.save(2)
    run.uploads.wait(LONG)
    assert storage.steps() == ["step-1", "step-2"]


def test_damaged_checkpoint_does_not_delay_the_next(
    storage: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    storage.open.clear()
    run.save(1)
    assert storage.entered.wait(60)
    manifest = run.save(2) / NAME
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":2', b'"step":9'))
    run.save(3, keep=3)
    storage.open.set()
    run.uploads.wait(LONG)
    assert storage.steps() == ["step-1", "step-3"]
    assert "step-2 was not uploaded" in caplog.text
    assert "does not match its digest" in caplog.text
