"""A data worker that cannot send its batch and a helper thread that fails are reported within
seconds."""

from __future__ import annotations

import multiprocessing.process
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_common.exit_status import EVICTED
from shoal_worker.child_processes import keep_socket_paths_short
from shoal_worker.data.fetch import Fetcher, Request
from torch.utils.data import Dataset

from tests.zygote.children import Zygote

REQUEST = Request(epoch=0, indices=(1, 2), key=(0, 0, 0, 0))


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


@pytest.fixture
def long_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory whose name is too long for sockets. multiprocessing has not created its
    own directory yet."""
    directory = tmp_path / ("d" * 100)
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    config: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    monkeypatch.setitem(config, "tempdir", None)
    return directory


def test_data_workers_deliver_batches_under_a_temporary_directory_with_a_long_name(
    long_directory: Path,
) -> None:
    fetcher = Fetcher(Numbers(), collate_fn=torch.stack, num_workers=1, pin_memory=False)
    try:
        batch = fetcher.fetch(REQUEST, lambda: iter([REQUEST]))
    finally:
        fetcher.close()
    assert batch[:, 0].tolist() == [1, 2]
    assert tempfile.gettempdir() == str(long_directory)


def test_short_temporary_directory_is_left_unchanged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    monkeypatch.setitem(config, "tempdir", None)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    keep_socket_paths_short()
    assert config["tempdir"] is None


def test_a_batch_that_cannot_be_sent_is_an_error_within_seconds(
    capfd: pytest.CaptureFixture[str],
) -> None:
    fetcher = Fetcher(
        Numbers(),
        collate_fn=lambda samples: (samples, lambda: None),
        num_workers=1,
        pin_memory=False,
    )
    began = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            fetcher.fetch(REQUEST, lambda: iter([REQUEST]))
    finally:
        fetcher.close()
    assert time.monotonic() - began < 15
    assert "a data worker could not send its batch" in capfd.readouterr().err


FAILING = """
import threading, time
from shoal_worker.backends.process_end import end_now
from shoal_worker.child_processes import report_dead_threads

report_dead_threads(lambda said: end_now(75, said))
for name in ("somebody-elses", "shoal-link"):
    thread = threading.Thread(target=lambda: 1 / 0, name=name)
    thread.start()
    thread.join()
    print(name, "reported", flush=True)
time.sleep(60)
"""


def test_the_death_of_a_helper_thread_ends_the_process_with_a_message(
    zygote: Zygote, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    process = zygote.start("script", [str(script)], output=tmp_path / "log")
    assert process.wait() == EVICTED
    assert [line for line in process.said().splitlines() if line.endswith("reported")] == [
        "somebody-elses reported"
    ]
    assert "thread shoal-link ended with ZeroDivisionError: division by zero" in process.said()
