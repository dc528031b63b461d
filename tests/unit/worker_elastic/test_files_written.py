"""Files that several ranks of one machine write at the same time cause a warning; other files do
not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from shoal_worker.elastic.session.files_written import MOST, WhenWritten, WrittenFiles

NOW = WhenWritten(rank=0, generation=2, steps=7)


@pytest.fixture
def rank(tmp_path: Path) -> Callable[[WhenWritten | None], WrittenFiles]:
    return lambda now: WrittenFiles(tmp_path / "notes", lambda: now)


Rank = Callable[[WhenWritten | None], WrittenFiles]


def test_two_ranks_that_write_one_file_at_once_are_warned_of_once(
    rank: Rank, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "model.pt")
    with caplog.at_level(logging.WARNING):
        rank(NOW._replace(rank=1)).writes(tmp_path / "link")
        for _ in range(2):
            rank(NOW).writes(str(tmp_path / "model.pt"))
            rank(NOW._replace(rank=2)).writes(str(tmp_path / "model.pt"))
    assert caplog.text.count("ranks 0 and 1 both wrote") == 1
    assert f"{tmp_path / 'model.pt'} after step 7" in caplog.text
    assert "shoal.save_checkpoint" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("before", "path"),
    [
        pytest.param(NOW, "model.pt", id="the same rank again"),
        pytest.param(NOW._replace(rank=1), "other.pt", id="another file"),
        pytest.param(NOW._replace(rank=1, steps=6), "model.pt", id="in turn"),
        pytest.param(NOW._replace(rank=1, generation=1), "model.pt", id="ranks that moved up"),
        pytest.param(None, "model.pt", id="a joiner that replays"),
    ],
)
def test_intentional_writes_are_not_warned_of(
    before: WhenWritten | None,
    path: str,
    rank: Rank,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        rank(before).writes(tmp_path / path)
        rank(NOW).writes(tmp_path / "model.pt")
    assert not caplog.records


@pytest.mark.parametrize("path", ["/dev/null", "cache/.fonts/list.json", "data.lock", "."])
def test_devices_caches_and_locks_are_ignored(
    path: str, rank: Rank, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        rank(NOW._replace(rank=1)).writes(tmp_path / path)
        rank(NOW).writes(tmp_path / path)
    assert not caplog.records
    assert not (tmp_path / "notes").exists()


def test_writes_of_other_threads_are_ignored(
    rank: Rank, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = [rank(NOW), rank(NOW._replace(rank=1))]

    def write() -> None:
        for each in files:
            each.writes(tmp_path / "model.pt")

    writer = threading.Thread(target=write)
    with caplog.at_level(logging.WARNING):
        writer.start()
        writer.join()
    assert not caplog.records


def test_notes_are_bounded_and_a_missing_directory_does_no_harm(rank: Rank, tmp_path: Path) -> None:
    files = rank(NOW)
    for number in range(2 * MOST):
        files.writes(tmp_path / f"sample-{number}.png")
    assert len(list((tmp_path / "notes").iterdir())) == MOST
    WrittenFiles(tmp_path / "no" / "such", lambda: NOW).writes(tmp_path / "model.pt")
