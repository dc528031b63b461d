"""Checkpoints on a real S3 server, under its faults: overload, silence, cut and shortened uploads,
wrong credentials, and lists that lag behind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
import shoal
import torch
from shoal_common.errors import (
    ConfigurationError,
    PermissionDeniedError,
    UnavailableError,
)
from shoal_worker import object_storage
from shoal_worker.checkpoint.files import read_checkpoint, write_checkpoint
from shoal_worker.checkpoint.manifest import NAME, CheckpointInfo
from shoal_worker.checkpoint.remote import RemoteCheckpoints
from shoal_worker.object_storage import ObjectFolder
from shoal_worker.state.tree import Snapshot
from torch import nn

from tests.integration.worker_elastic.cluster import cluster
from tests.s3_server import BUCKET, S3Server, s3_server
from tests.zygote.children import Zygote, eventually

MOMENT = timedelta(seconds=1)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3Server:
    """The server without faults, and an environment in which clients use it."""
    server.set_faults()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SHOAL_STAGING_DIR", str(tmp_path / "staging"))
    timeouts = {"connect_timeout": 120, "read_timeout": 120}  # instead of 5 and 15
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": timeouts})
    return server


def url(tmp_path: Path) -> str:
    """A URL of this test alone."""
    return f"s3://{BUCKET}/{tmp_path.name}"


def remote(tmp_path: Path, **kw: timedelta) -> RemoteCheckpoints:
    return RemoteCheckpoints(ObjectFolder(url(tmp_path), **kw))


def local(tmp_path: Path, step: int, *, elements: int = 1000) -> Path:
    return write_checkpoint(
        tmp_path / "local",
        Snapshot.take({"model": {"weight": torch.arange(float(elements))}, "steps": step}),
        CheckpointInfo(step=step, strategy="ddp", world_size=1, generation=1, run="r"),
        fence=lambda: None,
        keep=99,
    )


def upload(tmp_path: Path, step: int, **kw: Any) -> Path:
    path = local(tmp_path, step, elements=kw.pop("elements", 1000))
    remote(tmp_path, **kw).upload(path, keep=2, fence=lambda: None)
    return path


def check_newest(tmp_path: Path, step: int, path: Path) -> None:
    """The newest checkpoint is that of `step`, and equals the local one at `path`."""
    checkpoints = remote(tmp_path)
    assert checkpoints.newest() == f"step-{step}"
    fetched = read_checkpoint(checkpoints.fetch(f"step-{step}", tmp_path / "other"))
    expected = read_checkpoint(path).state["model"]["weight"]
    assert torch.equal(fetched.state["model"]["weight"], expected)


def test_a_large_file_is_uploaded_in_parts(s3: S3Server, tmp_path: Path) -> None:
    path = upload(tmp_path, 1, elements=6 << 20)
    parts = {each.partition("partNumber=")[2][0] for each in s3.requests("PUT", "partNumber=")}
    assert parts == {"1", "2", "3", "4"}  # of 8 MiB, and the header
    check_newest(tmp_path, 1, path)


def test_keep_removes_older_checkpoints(s3: S3Server, tmp_path: Path) -> None:
    for step in range(1, 5):
        upload(tmp_path, step)
    assert remote(tmp_path).folder.names() == ["newest.json", "step-3", "step-4"]
    assert remote(tmp_path).folder.child("step-2").names() == []


@pytest.mark.parametrize("action", ["refuse", "hang", "cut"])
@pytest.mark.parametrize("text", ["model.safetensors", NAME])
def test_a_fault_of_a_moment_fails_nothing(
    s3: S3Server, tmp_path: Path, action: str, text: str
) -> None:
    s3.set_faults({"action": action, "method": "PUT", "text": text})
    path = upload(tmp_path, 1, silence=timedelta(seconds=3))
    assert len(s3.requests("PUT", f"{tmp_path.name}/step-1/{text}")) >= 2
    check_newest(tmp_path, 1, path)


def test_a_large_file_is_uploaded_although_one_part_hangs(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_storage, "_SLOWEST", 1 << 40)  # or the test waits for minutes
    s3.set_faults({"action": "hang", "method": "PUT", "text": "partNumber=3"})
    path = upload(tmp_path, 1, elements=6 << 20, silence=timedelta(seconds=5))
    check_newest(tmp_path, 1, path)


def test_a_storage_that_stays_silent_ends_every_kind_of_request(
    s3: S3Server, tmp_path: Path
) -> None:
    path = upload(tmp_path, 1)
    s3.set_faults({"action": "hang", "text": tmp_path.name, "times": 10_000})
    folder = ObjectFolder(url(tmp_path), MOMENT, MOMENT)
    for request in (
        folder.names,
        lambda: folder.read("newest.json"),
        lambda: folder.write("other", b"1"),
        lambda: folder.remove(["newest.json"]),
        lambda: folder.download("newest.json", tmp_path / "file", 1),
        lambda: folder.copy(folder.child("step-1"), NAME, 1),
    ):
        with pytest.raises(UnavailableError, match="nothing was transferred for 1 s"):
            request()
    s3.set_faults()
    check_newest(tmp_path, 1, path)


def test_a_shortened_upload_is_found_and_repeated(s3: S3Server, tmp_path: Path) -> None:
    s3.set_faults({"action": "shorten", "method": "PUT", "text": "model.safetensors"})
    path = upload(tmp_path, 1)
    assert len(s3.requests("PUT", f"{tmp_path.name}/step-1/model.safetensors")) == 2
    check_newest(tmp_path, 1, path)


def test_a_storage_that_stays_overloaded_leaves_no_checkpoint(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # of botocore, which would wait for a minute
    s3.set_faults({"action": "refuse", "method": "PUT", "text": "model", "times": 10_000})
    with pytest.raises(UnavailableError, match="it was repeated for 1 s") as raised:
        upload(tmp_path, 1, patience=MOMENT)
    assert raised.value.reason == "OBJECT_STORAGE_UNAVAILABLE"
    assert remote(tmp_path).newest() is None


def test_a_wrong_credential_is_named(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another-key")
    with pytest.raises(PermissionDeniedError, match="check the credentials") as raised:
        remote(tmp_path).newest()
    assert raised.value.reason == "OBJECT_STORAGE_REFUSED"
    with pytest.raises(PermissionDeniedError, match=r"step-1/.* was refused"):
        upload(tmp_path, 1)


def test_a_missing_bucket_is_named(s3: S3Server, tmp_path: Path) -> None:
    folder = ObjectFolder("s3://no-such-bucket/run")
    with pytest.raises(ConfigurationError, match="expected an existing bucket"):
        RemoteCheckpoints(folder).upload(local(tmp_path, 1), keep=1, fence=lambda: None)


def test_a_list_that_lags_behind_hides_no_checkpoint(s3: S3Server, tmp_path: Path) -> None:
    upload(tmp_path, 1)
    path = upload(tmp_path, 2)
    s3.set_faults({"action": "hide", "method": "GET", "text": "list-type", "hidden": "step-2"})
    check_newest(tmp_path, 2, path)
    s3.set_faults({"action": "hide", "text": "list-type", "hidden": "step-", "times": 10_000})
    path = upload(tmp_path, 3)
    check_newest(tmp_path, 3, path)
    s3.set_faults()
    check_newest(tmp_path, 3, path)


def test_a_checkpoint_that_the_list_still_has_is_absent(s3: S3Server, tmp_path: Path) -> None:
    """The manifest is gone, and lists still contain its folder."""
    path = upload(tmp_path, 1)
    upload(tmp_path, 2)
    remote(tmp_path).folder.child("step-2").remove([NAME])
    check_newest(tmp_path, 1, path)


def train(where: str, epochs: int) -> bool:
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


def test_a_run_resumes_from_s3(s3: S3Server, tmp_path: Path) -> None:
    assert not any(shoal.launch(lambda: train(url(tmp_path), 1), world_size=2))
    assert all(shoal.launch(lambda: train(url(tmp_path), 2), world_size=3))
    assert remote(tmp_path).newest() == "step-4"
    assert shoal.load_full_state(url(tmp_path))["weight"].shape == (1, 8)


def test_a_run_with_a_wrong_credential_ends_at_once_on_all_ranks(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another-key")
    with pytest.raises(PermissionDeniedError, match="check the credentials"):
        shoal.launch(lambda: train(url(tmp_path), 1), world_size=2)


def test_the_page_s_script_runs(s3: S3Server, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/guides/object-storage.md").read_text()
    (script,) = re.findall(r'```python title="train.py"\n(.*?)```', page, re.DOTALL)
    script = script.replace("s3://my-bucket/run", url(tmp_path))

    def rank() -> None:
        exec(compile(script, "object-storage.md", "exec"), {"__name__": "__main__"})

    shoal.launch(rank, world_size=2)
    assert remote(tmp_path).folder.names() == [
        "model.safetensors",
        "newest.json",
        "step-12",
        "step-8",
    ]
    assert shoal.load_full_state(f"{url(tmp_path)}/step-8").keys() == (
        shoal.load_full_state(url(tmp_path)).keys()
    )


@pytest.mark.parametrize(
    "point", [pytest.param("upload_file@4", marks=pytest.mark.slow), "upload_manifest@2"]
)
def test_a_rank_that_is_killed_while_it_uploads_leaves_whole_checkpoints(
    zygote: Zygote, s3: S3Server, tmp_path: Path, point: str
) -> None:
    """The rank that uploads dies within its second upload, of step 20. The others continue."""
    with cluster(
        zygote,
        tmp_path,
        EPOCHS="4",
        STRATEGY="zero3",
        CHECKPOINTS=url(tmp_path),
        SHOAL_STAGING_DIR=str(tmp_path / "staging"),
        **s3.environment,
    ) as running:
        with running.held(before=25):
            running.start(0, SHOAL_FAILPOINTS=f"checkpoint.{point}=kill")
            eventually(lambda: len(running.job().members) == 1, "the worker that becomes rank 0")
            running.start(1)
            running.start(2)
            eventually(running.workers[0].ended.is_set, "the death of the rank that uploads")
            assert remote(tmp_path).newest() == "step-10"
            running.wait_ranked(1)
            running.wait_ranked(2)
        running.finish(1, 2)
    checkpoints = remote(tmp_path)
    assert checkpoints.newest() == "step-40"
    for name in checkpoints.folder.names():
        if name.startswith("step-"):
            read_checkpoint(checkpoints.fetch(name, tmp_path / "other"))
