"""Values of flags: accepted forms, and the error for each mistake."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from shoal.cli.terminal.console import run_to_exit
from shoal.launcher.clusters.jobs import new_job_id
from shoal.launcher.workers import settings as launcher_settings
from shoal.launcher.workers.settings import (
    LogSettings,
    NodeRange,
    RunSettings,
    Streams,
    parse_workers,
    worker_command,
)
from shoal_common.errors import ConfigurationError


def settings(**changes: object) -> RunSettings:
    values: dict[str, object] = {
        "command": ("true",),
        "program": "true",
        "job_id": "job",
        "workers": 2,
        **changes,
    }
    return RunSettings(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "least", "most"), [("1", 1, 1), ("4", 4, 4), ("1:4", 1, 4), ("2:2", 2, 2)]
)
def test_node_ranges(text: str, least: int, most: int) -> None:
    assert NodeRange.parse(text) == NodeRange(least, most)


@pytest.mark.parametrize("text", ["", "0", "3:2", "a", "1:", ":2", "1:2:3", "-1", "1.5"])
def test_wrong_node_ranges_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--nnodes"):
        NodeRange.parse(text)


def test_workers_are_a_number_or_derived_from_the_machine() -> None:
    assert parse_workers("3") == 3
    assert parse_workers("cpu") == os.cpu_count()


@pytest.mark.parametrize("text", ["", "0", "-1", "many", "1e3", "10001"])
def test_wrong_numbers_of_workers_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--nproc-per-node"):
        parse_workers(text)


def torch_that_sees(devices: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a machine with a driver and a torch that counts this many devices."""
    (directory / "torch.py").write_text(
        f"class cuda:\n    device_count = staticmethod(lambda: {devices})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(directory))
    monkeypatch.setattr(launcher_settings, "_DRIVERS", (directory,))


def test_gpu_and_auto_start_one_worker_per_visible_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_that_sees("4", tmp_path, monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert parse_workers("gpu") == parse_workers("auto") == 4


def test_failing_device_count_is_reported_with_torchs_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_that_sees("1 / 0", tmp_path, monkeypatch)
    with pytest.raises(
        ConfigurationError,
        match=r"(?s)cannot count the CUDA devices.*ZeroDivisionError.*pass a number to "
        r"--nproc-per-node",
    ):
        parse_workers("gpu")


def test_gpu_slices_are_counted_by_their_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-aa, MIG-bb,MIG-cc")
    assert parse_workers("gpu") == 3


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has GPUs")
def test_gpu_without_a_gpu_names_the_remedy_and_auto_uses_the_cores() -> None:
    assert parse_workers("auto") == os.cpu_count()
    with pytest.raises(ConfigurationError, match="use a number, cpu or auto"):
        parse_workers("gpu")


def test_commands_match_those_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert worker_command(str(script), ["-m", "x"], module=False, python=True) == (
        sys.executable,
        "-u",
        str(script),
        "-m",
        "x",
    )
    assert worker_command("pkg.train", ["1"], module=True, python=True) == (
        sys.executable,
        "-u",
        "-m",
        "pkg.train",
        "1",
    )
    assert worker_command("echo", ["1"], module=False, python=False) == ("echo", "1")


def test_missing_script_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match=r"'missing.py' does not exist here .* use -m"):
        worker_command("missing.py", [], module=False, python=True)


def test_a_module_is_run_by_python() -> None:
    with pytest.raises(ConfigurationError, match="cannot be combined"):
        worker_command("train", [], module=True, python=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": NodeRange(2, 2)}, "--rdzv-endpoint"),
        ({"workers": 6000, "nodes": NodeRange(1, 2), "endpoint": "c:1"}, "10000"),
        ({"max_restarts": -1}, "--max-restarts -1"),
        ({"servers": -1}, "--servers -1"),
        ({"max_servers": 2}, "--max-servers 2 requires --servers"),
        ({"servers": 3, "max_servers": 2}, "--max-servers 2: expected at least 3"),
        ({"master_port": 0}, "--master-port 0"),
        ({"node_rank": 1}, "--node-rank 1"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        settings(**changes)


class TestLogs:
    def test_default_shows_everything_on_the_console_and_writes_no_files(self) -> None:
        logs = LogSettings()
        assert logs.to_console(0, Streams.OUT)
        assert not logs.to_file(0, Streams.OUT)

    def test_a_directory_alone_keeps_everything_and_shows_it(self, tmp_path: Path) -> None:
        logs = LogSettings.parse(place=str(tmp_path), redirects="0", tee="0", console_ranks="")
        assert logs.to_console(1, Streams.ERR)
        assert logs.to_file(1, Streams.ERR)

    def test_files_for_a_url_are_first_written_to_the_staging_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SHOAL_STAGING_DIR", str(tmp_path))
        monkeypatch.setenv("SHOAL_UPLOAD_TIMEOUT_S", "7")
        one, other = (
            LogSettings.parse(place="s3://bucket/logs/", redirects="0", tee="0", console_ranks="")
            for _ in range(2)
        )
        assert one.url == "s3://bucket/logs"
        assert one.upload_timeout == timedelta(seconds=7)
        assert one.directory is not None
        assert one.directory.parent == tmp_path
        assert one.directory != other.directory
        assert one.to_file(0, Streams.ERR)

    def test_a_file_url_is_a_directory(self, tmp_path: Path) -> None:
        logs = LogSettings.parse(
            place=f"file://{tmp_path}", redirects="0", tee="0", console_ranks=""
        )
        assert (logs.directory, logs.url) == (tmp_path, None)

    @pytest.mark.parametrize(
        ("place", "message"),
        [
            ("s3://bucket", "expected a bucket and a path"),
            ("ftp://host/logs", "a URL that begins with s3://"),
            ("gs://bucket/logs", "gcsfs; install it with pip install 'shoal"),
        ],
    )
    def test_unusable_url_is_refused_before_anything_starts(
        self, place: str, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "gcsfs", None)
        with pytest.raises(ConfigurationError, match=message):
            LogSettings.parse(place=place, redirects="0", tee="0", console_ranks="")

    def test_records_at_a_url_are_refused_before_anything_starts(self) -> None:
        with pytest.raises(ConfigurationError, match="--record-dir gs://bucket/r: expected a dir"):
            run_to_exit(settings(record_directory=Path("gs://bucket/r")))

    def test_redirects_are_not_shown_on_the_console(self, tmp_path: Path) -> None:
        logs = LogSettings.parse(
            place=str(tmp_path), redirects="0:1,1:2", tee="0", console_ranks=""
        )
        assert (logs.to_console(0, Streams.OUT), logs.to_file(0, Streams.OUT)) == (False, True)
        assert (logs.to_console(0, Streams.ERR), logs.to_file(0, Streams.ERR)) == (True, False)
        assert (logs.to_console(1, Streams.OUT), logs.to_file(1, Streams.ERR)) == (True, True)
        assert (logs.to_console(2, Streams.OUT), logs.to_file(2, Streams.OUT)) == (True, False)

    def test_filter_applies_only_to_the_console(self, tmp_path: Path) -> None:
        logs = LogSettings.parse(place=str(tmp_path), redirects="0", tee="3", console_ranks="0,2")
        assert [logs.to_console(index, Streams.OUT) for index in range(3)] == [True, False, True]
        assert all(logs.to_file(index, Streams.OUT) for index in range(3))

    @pytest.mark.parametrize(
        ("values", "flag"),
        [
            ({"redirects": "4"}, "--redirects"),
            ({"tee": "0:4"}, "--tee"),
            ({"console_ranks": "a"}, "--local-ranks-filter"),
        ],
    )
    def test_mistakes_name_the_flag(self, values: dict[str, str], flag: str) -> None:
        with pytest.raises(ConfigurationError, match=flag):
            LogSettings.parse(
                **{"place": None, "redirects": "0", "tee": "0", "console_ranks": "", **values}
            )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "program", ["train.py", "examples/my train.py", "...", "ünïcode.py", "x" * 200]
)
def test_job_ids_are_valid_for_the_coordinator(program: str) -> None:
    import re

    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", new_job_id(program))
