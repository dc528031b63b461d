"""Tests of a real S3 server alone: parts, access keys, lists that lag behind, log files, and a run
whose rank is killed. test_object_storages.py has the faults of all storages."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import shoal
from shoal_common.errors import PermissionDeniedError
from shoal_worker import object_storage
from shoal_worker.checkpoint.files import read_checkpoint
from shoal_worker.checkpoint.manifest import NAME
from shoal_worker.object_storage import ObjectFolder

from tests.integration.common.storages import Storage, connected, train
from tests.integration.worker_elastic.cluster import cluster
from tests.s3_server import s3_server
from tests.storage_server import StorageServer
from tests.zygote.children import Zygote, eventually


@pytest.fixture(scope="module")
def server() -> Iterator[StorageServer]:
    with s3_server() as running:
        yield running


@pytest.fixture
def s3(server: StorageServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Storage:
    """A folder in the server, without faults, and an environment in which clients use it."""
    return connected("s3", server, tmp_path, monkeypatch)


def test_a_large_file_is_uploaded_in_parts(s3: Storage) -> None:
    path = s3.upload(1, elements=6 << 20)
    parts = {each.partition("partNumber=")[2][0] for each in s3.requests("PUT", "partNumber=")}
    assert parts == {"1", "2", "3", "4"}  # of 8 MiB, and the header
    s3.check_newest(1, path)


def test_a_large_file_is_uploaded_although_one_part_hangs(
    s3: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_storage, "_SLOWEST", 1 << 40)  # or the test waits for minutes
    s3.set_faults({"action": "hang", "method": "PUT", "text": "partNumber=3"})
    path = s3.upload(1, elements=6 << 20, silence=timedelta(seconds=5))
    s3.check_newest(1, path)


def test_a_wrong_credential_is_named(s3: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another-key")
    with pytest.raises(PermissionDeniedError, match="check the credentials") as raised:
        s3.remote().newest()
    assert raised.value.reason == "OBJECT_STORAGE_REFUSED"
    with pytest.raises(PermissionDeniedError, match=r"step-1/.* was refused"):
        s3.upload(1)


def test_a_list_that_lags_behind_hides_no_checkpoint(s3: Storage) -> None:
    s3.upload(1)
    path = s3.upload(2)
    s3.set_faults({"action": "hide", "method": "GET", "text": "list-type", "hidden": "step-2"})
    s3.check_newest(2, path)
    s3.set_faults({"action": "hide", "text": "list-type", "hidden": "step-", "times": 10_000})
    path = s3.upload(3)
    s3.check_newest(3, path)
    s3.set_faults()
    s3.check_newest(3, path)


def test_removed_checkpoint_still_in_the_list_is_absent(s3: Storage) -> None:
    """The manifest is gone, and lists still contain its folder."""
    path = s3.upload(1)
    s3.upload(2)
    s3.remote().folder.child("step-2").remove([NAME])
    s3.check_newest(1, path)


def test_a_run_with_a_wrong_credential_ends_at_once_on_all_ranks(
    s3: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another-key")
    with pytest.raises(PermissionDeniedError, match="check the credentials"):
        shoal.launch(lambda: train(s3.url, 1), world_size=2)


@pytest.mark.parametrize("fails", [False, True], ids=["stored", "refused"])
def test_log_files_of_a_run_are_uploaded(
    shell: Any, s3: Storage, tmp_path: Path, fails: bool
) -> None:
    """A storage that fails does not change the status of the run; the files remain."""
    if fails:
        s3.set_faults({"action": "refuse", "method": "PUT", "text": s3.name, "times": 10_000})
    script = shell.script("import os, sys\nprint(os.environ['RANK'])\nprint('e', file=sys.stderr)")
    status, out, err = shell.run(
        *("run", "--nproc-per-node", "2", "--rdzv-id", "job", "--log-dir", f"{s3.url}/logs"),
        script,
        SHOAL_STAGING_DIR=str(tmp_path / "staging"),
        SHOAL_UPLOAD_TIMEOUT_S="1" if fails else "300",
        **s3.environment,
    )
    assert (status, sorted(out.splitlines())) == (0, ["[0]: 0", "[1]: 1"])
    kept = list((tmp_path / "staging").rglob("stdout.log"))
    if fails:
        assert sorted(file.read_text() for file in kept) == ["0\n", "1\n"]
        (line,) = [each for each in err.splitlines() if "logs were not all uploaded" in each]
        assert f"to {s3.url}/logs: " in line
        assert f"they remain in {kept[0].parents[3]}" in line
        return
    assert kept == []
    (line,) = [each for each in err.splitlines() if each.startswith("shoal: logs: ")]
    assert line.startswith(f"shoal: logs: {s3.url}/logs/job-")
    run = ObjectFolder(line.removeprefix("shoal: logs: "))
    for rank in "01":
        files = run.child(f"attempt_0/{rank}")
        assert files.read("stdout.log") == f"{rank}\n".encode()
        assert b"e\n" in (files.read("stderr.log") or b"")


@pytest.mark.parametrize(
    "point", [pytest.param("upload_file@4", marks=pytest.mark.slow), "upload_manifest@2"]
)
def test_rank_killed_while_it_uploads_leaves_complete_checkpoints(
    zygote: Zygote, s3: Storage, tmp_path: Path, point: str
) -> None:
    """The rank that uploads dies within its second upload, of step 20. The others continue."""
    with cluster(
        zygote,
        tmp_path,
        EPOCHS="4",
        STRATEGY="zero3",
        CHECKPOINTS=s3.url,
        SHOAL_STAGING_DIR=str(tmp_path / "staging"),
        **s3.environment,
    ) as running:
        with running.held(before=25):
            running.start(0, SHOAL_FAILPOINTS=f"checkpoint.{point}=kill")
            eventually(lambda: len(running.job().members) == 1, "the worker that becomes rank 0")
            running.start(1)
            running.start(2)
            eventually(running.workers[0].ended.is_set, "the death of the rank that uploads")
            assert s3.remote().newest() == "step-10"
            running.wait_ranked(1)
            running.wait_ranked(2)
        running.finish(1, 2)
    checkpoints = s3.remote()
    assert checkpoints.newest() == "step-40"
    for name in checkpoints.folder.names():
        if name.startswith("step-"):
            read_checkpoint(checkpoints.fetch(name, tmp_path / "other"))
