"""A rank that ends waits for the run's last checkpoint if another rank completes it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from shoal_common.errors import UnavailableError
from shoal_worker.checkpoint import manifest
from shoal_worker.checkpoint.saving import _Elsewhere


class Session:
    """A session that records which members have left."""

    run = "this-run"

    def __init__(self, *gone: str) -> None:
        self._gone = gone

    def is_gone(self, member_id: str) -> bool:
        return member_id in self._gone


def awaited(path: Path, *, shared: bool, gone: bool, uploads: bool = False) -> None:
    session: Any = Session("first") if gone else Session()
    _Elsewhere(path, "first", shared=shared, uploads=uploads).wait(session)


def test_present_checkpoint_is_not_missed_whoever_has_left(tmp_path: Path) -> None:
    path = tmp_path / "step-7"
    path.mkdir()
    (path / manifest.NAME).write_text("{}")
    for shared in (False, True):
        awaited(path, shared=shared, gone=True)


def test_checkpoint_is_awaited_while_its_completing_rank_is_alive(tmp_path: Path) -> None:
    path = tmp_path / "step-7"
    later = threading.Timer(0.2, path.mkdir)
    later.start()
    awaited(path, shared=True, gone=False)
    assert path.is_dir()
    later.join()


def test_checkpoint_is_missed_when_its_completing_rank_has_left(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="step-7 was abandoned: a worker was lost") as raised:
        awaited(tmp_path / "step-7", shared=True, gone=True)
    assert raised.value.reason == "CHECKPOINT_NOT_WRITTEN"


def test_nothing_is_missed_in_a_possibly_foreign_directory_without_an_older_checkpoint_of_the_run(
    tmp_path: Path,
) -> None:
    awaited(tmp_path / "step-7", shared=False, gone=True)
    older = tmp_path / "step-6"
    older.mkdir()
    (older / manifest.NAME).write_text("{}")
    with pytest.raises(UnavailableError, match="step-7"):
        awaited(tmp_path / "step-7", shared=False, gone=True)


def test_checkpoint_not_uploaded_is_missed_when_its_uploading_rank_has_left(tmp_path: Path) -> None:
    path = tmp_path / "step-7"
    path.mkdir()
    (tmp_path / ".uploaded").write_text("step-6")
    with pytest.raises(UnavailableError, match="step-7 was not uploaded") as raised:
        awaited(path, shared=True, gone=True, uploads=True)
    assert raised.value.reason == "CHECKPOINT_NOT_UPLOADED"
    (tmp_path / ".uploaded").write_text("step-7")
    awaited(path, shared=True, gone=True, uploads=True)
