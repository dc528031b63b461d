"""A data directory belongs to one run. It also keeps the data of earlier runs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from shoal_common.errors import ConfigurationError
from shoal_common.formats.runs import Run
from shoal_ps_server.storage.directory import DataDirectory

FIRST, SECOND = Run(number=1, began_unix_ms=10), Run(number=2, began_unix_ms=20)


def fill(directory: Path, text: str) -> None:
    for name in ("snapshot.safetensors", "journal.id", "journal.00000001"):
        (directory / name).write_text(text)


def contents(directory: Path) -> list[str]:
    return [
        path.read_text()
        for path in sorted(directory.glob("journal.*")) + sorted(directory.glob("snapshot*"))
    ]


def test_new_directory_belongs_to_no_run_and_keeps_the_recorded_one(tmp_path: Path) -> None:
    with DataDirectory(tmp_path) as data:
        assert data.run is None
    fill(tmp_path, "opened, and of no run yet")
    with DataDirectory(tmp_path) as data:
        assert data.run is None
        data.note_run(FIRST)
    with DataDirectory(tmp_path) as data:
        assert data.run == FIRST


def test_data_left_by_an_older_release_belongs_to_the_first_run(tmp_path: Path) -> None:
    fill(tmp_path, "old")
    with DataDirectory(tmp_path) as data:
        assert data.run == Run(number=1)


def test_data_set_aside_is_complete_and_the_newest_four_are_kept(tmp_path: Path) -> None:
    with DataDirectory(tmp_path) as data:
        for text, run in (("a", FIRST), *((text, SECOND) for text in "bcde")):
            # Redis may have lost the job and restarted its counter
            data.note_run(run)
            fill(tmp_path, text)
            folder = data.set_aside()
            assert contents(folder) == [text] * 3
            assert contents(tmp_path) == []
            assert data.run is None
    assert sorted(path.name for path in tmp_path.glob("run-*")) == [
        "run-2",
        "run-2.1",
        "run-2.2",
        "run-2.3",
    ]
    assert (tmp_path / "run-2" / "run").read_text() == "2:20\n"
    with DataDirectory(tmp_path) as data:
        assert data.run is None


def test_runs_without_stored_data_displace_none_of_the_kept_ones(tmp_path: Path) -> None:
    """Runs that stored nothing do not displace the kept data of other runs. Such runs occur when a
    container restarts repeatedly and fails before it trains."""
    with DataDirectory(tmp_path) as data:
        data.note_run(FIRST)
        fill(tmp_path, "a")
        assert data.set_aside() == tmp_path / "run-1"
        for number in (2, 3, 4):
            data.note_run(Run(number=number, began_unix_ms=number))
            data.recover(job_id="j", server_id="s")
            data.segments.create(1, previous_end=0)
            assert data.set_aside() is None
            assert data.run is None
            assert contents(tmp_path) == []
    assert [path.name for path in tmp_path.glob("run-*")] == ["run-1"]
    assert contents(tmp_path / "run-1") == ["a"] * 3


@pytest.mark.parametrize("moved", [0, 1, 2, 3, 4])
def test_kill_while_data_is_set_aside_is_repaired_by_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    with DataDirectory(tmp_path) as data:
        data.note_run(FIRST)
        fill(tmp_path, "a")
        renamed = 0
        rename = Path.rename

        def dies(path: Path, target: Path) -> Path:
            nonlocal renamed
            if target.parent.name == "run-1":
                if renamed == moved:
                    raise KeyboardInterrupt  # a kill: nothing after it is executed
                renamed += 1
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", dies)
        with contextlib.suppress(KeyboardInterrupt):
            data.set_aside()
        monkeypatch.undo()
    with DataDirectory(tmp_path) as data:
        assert data.run is None
    assert contents(tmp_path) == []
    assert contents(tmp_path / "run-1") == ["a"] * 3
    assert (tmp_path / "run-1" / "run").read_text() == "1:10\n"


def test_invalid_run_file_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("three\n")
    with pytest.raises(ConfigurationError, match=r"run='three': expected NUMBER:MILLISECONDS"):
        DataDirectory(tmp_path)
