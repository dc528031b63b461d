"""Log files are uploaded while they grow, in parts of bounded size. A storage that fails neither
changes the result of a run nor delays its end without a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
from shoal.launcher.workers import log_uploads
from shoal.launcher.workers.log_uploads import LogUploads

from tests.zygote.children import eventually

URL = "memory://bucket/logs"
SOON = timedelta(milliseconds=10)
LONG = timedelta(seconds=60)
FILE = "job-1/attempt_0/0/stdout.log"


class Storage:
    """fsspec's storage in memory, whose writes wait for `open` and may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: Any = fsspec.filesystem("memory")
        self.files.store.clear()
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None
        self.writes: list[tuple[str, int]] = []
        self.on_write: Callable[[], None] | None = None
        plain = type(self.files).pipe_file
        storage = self

        def pipe_file(self: Any, path: str, content: bytes, **kw: Any) -> None:
            assert storage.open.wait(60)
            storage.writes.append((path.removeprefix("bucket/logs/"), len(content)))
            if storage.on_write is not None:
                storage.on_write()
            if storage.error is not None:
                raise storage.error
            plain(self, path, content, **kw)

        monkeypatch.setattr(type(self.files), "pipe_file", pipe_file)

    def content(self, name: str) -> bytes | None:
        """Returns the content of an object; None if there is no such object."""
        stored = self.files.store.get(f"/bucket/logs/{name}")
        return None if stored is None else bytes(stored.getvalue())


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    made = Storage(monkeypatch)
    yield made
    made.open.set()
    made.files.store.clear()


class Run:
    """A run that writes log files."""

    def __init__(
        self, directory: Path, *, patience: timedelta = LONG, interval: timedelta = SOON
    ) -> None:
        self.directory = directory / "logs"
        self.notes: list[str] = []
        self.said: list[str] = []
        self.uploads = LogUploads(
            URL, self.directory, patience=patience, note=self.notes.append, interval=interval
        )

    def write(self, content: bytes, name: str = FILE) -> None:
        file = self.directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as opened:
            opened.write(content)

    def finish(self) -> str:
        self.uploads.end_notes()
        self.uploads.finish(self.said.append)
        return self.said[-1] if self.said else ""


def test_files_are_uploaded_while_they_grow(storage: Storage, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.write(b"first\n")
    eventually(lambda: storage.content(FILE) == b"first\n", "the first upload")
    run.write(b"second\n")
    eventually(lambda: storage.content(FILE) == b"first\nsecond\n", "the second upload")
    run.write(b"last\n")
    run.write(b"error\n", "job-1/attempt_1/3/stderr.log")
    assert run.finish() == f"logs: {URL}/job-1"
    assert storage.content(FILE) == b"first\nsecond\nlast\n"
    assert storage.content("job-1/attempt_1/3/stderr.log") == b"error\n"
    assert not run.directory.exists()
    assert run.notes == []


def test_only_the_last_part_of_a_file_is_uploaded_again(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_uploads, "PART", 10)
    run = Run(tmp_path)
    run.write(b"0123456789abcdefghijABC")
    eventually(lambda: storage.content(f"{FILE}.3") == b"ABC", "the first upload")
    run.write(b"DEFGHIJ")
    eventually(lambda: storage.content(f"{FILE}.3") == b"ABCDEFGHIJ", "the second upload")
    run.write(b"+")
    run.finish()
    assert [storage.content(each) for each in (FILE, f"{FILE}.2", f"{FILE}.4")] == [
        b"0123456789",
        b"abcdefghij",
        b"+",
    ]
    names = [name for name, _ in storage.writes]
    assert [names.count(each) for each in (FILE, f"{FILE}.2", f"{FILE}.4")] == [1, 1, 1]
    assert max(size for _, size in storage.writes) == 10


def test_file_that_grows_during_each_request_does_not_block_the_upload_of_others(
    storage: Storage, tmp_path: Path
) -> None:
    run = Run(tmp_path, interval=timedelta(hours=1))
    other = "job-1/attempt_0/1/stdout.log"
    storage.on_write = lambda: run.write(b"progress\n")
    run.write(b"last rank\n", other)
    run.write(b"progress\n")
    eventually(lambda: storage.content(other) == b"last rank\n", "the other file")
    storage.on_write = None
    run.finish()


def test_nothing_is_uploaded_between_intervals(storage: Storage, tmp_path: Path) -> None:
    run = Run(tmp_path, interval=timedelta(hours=1))
    run.write(b"first")
    eventually(lambda: storage.content(FILE) == b"first", "the first upload, after a second")
    run.write(b"second")
    assert run.finish() == f"logs: {URL}/job-1"
    assert storage.writes == [(FILE, 5), (FILE, 11)]


def test_each_outage_of_a_storage_is_logged_once_with_its_end(
    storage: Storage, tmp_path: Path
) -> None:
    run = Run(tmp_path)
    for _ in range(2):
        run.notes.clear()
        storage.writes.clear()
        storage.error = OSError("503")
        run.write(b"line\n")
        eventually(lambda: len(storage.writes) > 3, "several attempts")
        (noted,) = run.notes
        assert f"cannot be uploaded to {URL} at present" in noted
        assert f"OSError: 503); they are kept in {run.directory}" in noted
        storage.error = None
        eventually(lambda: len(run.notes) == 2, "the end of the failure")
        assert run.notes[1] == f"the logs are uploaded to {URL} again"
    assert run.finish() == f"logs: {URL}/job-1"
    assert storage.content(FILE) == b"line\n" * 2


@pytest.mark.parametrize(
    ("error", "patience"),
    [(OSError("503"), timedelta(seconds=0.3)), (PermissionError("not for you"), LONG)],
    ids=["failing", "refused"],
)
def test_logs_that_cannot_be_uploaded_remain(
    storage: Storage, tmp_path: Path, error: Exception, patience: timedelta
) -> None:
    """A refusal ends the wait at once."""
    storage.error = error
    run = Run(tmp_path, patience=patience, interval=LONG)
    run.write(b"line\n")
    eventually(lambda: bool(run.notes), "the first attempt, after a second")
    said = run.finish()
    assert f"the logs were not all uploaded to {URL}" in said
    assert str(error) in said
    assert f"they remain in {run.directory}" in said
    assert (run.directory / FILE).read_bytes() == b"line\n"


def test_a_storage_that_hangs_does_not_keep_the_run_from_ending(
    storage: Storage, tmp_path: Path
) -> None:
    storage.open.clear()
    run = Run(tmp_path, patience=timedelta(seconds=0.3))
    run.write(b"line\n")
    said = run.finish()
    assert "the storage did not respond within 0.3 s; they remain in" in said
    assert (run.directory / FILE).read_bytes() == b"line\n"
    storage.open.set()
    run.uploads._thread.join(60)


def test_ctrl_c_ends_the_wait(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.open.clear()
    run = Run(tmp_path)
    run.write(b"line\n")

    def interrupted(timeout: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run.uploads._thread, "join", interrupted)
        assert f"{URL}: interrupted; they remain in {run.directory}" in run.finish()
    storage.open.set()
    run.uploads._thread.join(60)


def test_a_run_without_output_leaves_nothing(storage: Storage, tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.finish() == ""
    assert storage.writes == []
