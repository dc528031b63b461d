"""Checkpoints in an object store are complete or absent, no matter what interrupts an upload.

The storage is fsspec's, in memory; tests/integration/common/test_s3.py has a real server.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import shoal
import torch
from shoal_common.errors import (
    ConfigurationError,
    CorruptDataError,
    ShoalError,
    StaleGenerationError,
)
from shoal_worker.checkpoint.files import read_checkpoint, write_checkpoint
from shoal_worker.checkpoint.manifest import NAME, CheckpointInfo
from shoal_worker.checkpoint.remote import RemoteCheckpoints
from shoal_worker.object_storage import ObjectFolder, is_url, local_directory, local_path
from shoal_worker.state.tree import Snapshot
from torch import nn

URL = "memory://bucket/run"


@pytest.fixture(autouse=True)
def storage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    monkeypatch.setenv("SHOAL_STAGING_DIR", str(tmp_path / "staging"))
    yield files
    files.store.clear()


def keys(storage: Any) -> list[str]:
    return sorted(key.removeprefix("/bucket/run/") for key in storage.store)


def steps(storage: Any) -> list[str]:
    return [key.partition("/")[0] for key in keys(storage) if key.endswith(NAME)]


def local(tmp_path: Path, step: int, *, run: str = "r", value: float = 1.0, **info: Any) -> Path:
    return write_checkpoint(
        tmp_path / "local",
        Snapshot.take({"model": {"weight": torch.full((4,), value)}, "steps": step}),
        CheckpointInfo(step=step, strategy="ddp", world_size=1, generation=1, run=run, **info),
        fence=lambda: None,
        keep=99,
    )


def remote() -> RemoteCheckpoints:
    return RemoteCheckpoints(ObjectFolder(URL))


def upload(path: Path, *, keep: int = 2, fence: Callable[[], None] = lambda: None) -> None:
    remote().upload(path, keep=keep, fence=fence)


# ------------------------------------------------------------------------------------------ places


@pytest.mark.parametrize("url", ["s3://b/run", "gs://b/run/", "az://b/run", "memory://b/run"])
def test_a_url_is_distinguished_from_a_path(url: str) -> None:
    assert is_url(url)


@pytest.mark.parametrize("path", ["checkpoints", "/tmp/a", "a:b/c", "file:///tmp/a", Path("x/y")])
def test_path_is_not_a_url(path: str | Path) -> None:
    assert not is_url(path)


def test_a_file_url_is_a_directory() -> None:
    assert local_path("file:///tmp/a%20b") == Path("/tmp/a b")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("ftp://host/run", "s3://, gs://, az:// or file://"),
        ("s3://bucket", "a bucket and a path, such as s3://bucket/run"),
        ("s3:///run", "a bucket and a path"),
        (Path("s3://bucket/run"), "pass the URL as a str"),
    ],
)
def test_a_wrong_url_is_refused(place: str | Path, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        is_url(place)


def test_a_file_url_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="an absolute path on this machine"):
        local_path("file://elsewhere/run")


@pytest.mark.parametrize("place", ["s3://bucket/a", Path("gs://bucket/a"), "file:///a"])
def test_files_that_grow_during_a_run_are_refused_at_a_url(place: str | Path) -> None:
    url = str(place).replace(":/b", "://b").replace("file:///", "file://")
    with pytest.raises(ConfigurationError, match=f"--record-dir {url}: expected a directory"):
        local_directory(place, "--record-dir")


@pytest.mark.parametrize("path", ["logs", "/logs/a:b", Path("a:b/logs"), "C:/logs"])
def test_other_directories_for_growing_files_are_accepted(path: str | Path) -> None:
    assert local_directory(path, "--record-dir") == Path(path)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gcsfs" else found(name)
    )
    with pytest.raises(ConfigurationError, match=r"needs the package gcsfs; .*'shoal\[gcs\]'"):
        ObjectFolder.check("gs://bucket/run")


@pytest.mark.parametrize("gib", [1, 70, 100, 250])
def test_fewer_parts_are_sent_concurrently_if_they_are_larger(gib: int) -> None:
    size = gib << 30
    parts = ObjectFolder(URL.replace("memory", "s3"))._sent_parts(size)
    assert size / parts["chunksize"] < 10_000  # the most that S3 accepts
    assert parts["chunksize"] * parts["max_concurrency"] <= 32 << 20


# --------------------------------------------------------------------------------- whole or absent


def test_an_uploaded_checkpoint_is_downloaded_unchanged(tmp_path: Path) -> None:
    path = local(tmp_path, 5)
    upload(path)
    assert remote().newest() == "step-5"
    fetched = remote().fetch("step-5", tmp_path / "other")
    before, after = read_checkpoint(path), read_checkpoint(fetched)
    assert before.info == after.info
    assert torch.equal(before.state["model"]["weight"], after.state["model"]["weight"])


def test_the_manifest_is_written_last_and_removed_first(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    for name in ("put_file", "pipe_file", "rm_file"):
        plain = getattr(type(storage), name)

        def seen(self: Any, *args: Any, name: str = name, plain: Any = plain, **kw: Any) -> Any:
            place = args[1] if name == "put_file" else args[0]
            events.append(f"{name[:2]} {place.removeprefix('bucket/run/')}")
            return plain(self, *args, **kw)

        monkeypatch.setattr(type(storage), name, seen)
    upload(local(tmp_path, 1))
    written = [event for event in events if event.startswith(("pu", "pi")) and "step-1/" in event]
    assert written[0] == "pi step-1/uploading.json"
    assert written[-1] == f"pi step-1/{NAME}"
    upload(local(tmp_path, 2))
    events.clear()
    upload(local(tmp_path, 3))
    removed = [event for event in events if event.startswith("rm step-1/")]
    assert removed[0] == f"rm step-1/{NAME}"


@pytest.mark.parametrize("at", range(4))
def test_upload_interrupted_at_any_object_leaves_no_checkpoint(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The next upload of the run removes what is left."""
    upload(local(tmp_path, 1))
    writes = 0

    class Killed(BaseException):
        pass

    with monkeypatch.context() as patched:
        for name in ("put_file", "pipe_file"):
            plain = getattr(type(storage), name)

            def dies(self: Any, *args: Any, plain: Any = plain, **kw: Any) -> Any:
                nonlocal writes
                if writes == at:
                    raise Killed
                writes += 1
                return plain(self, *args, **kw)

            patched.setattr(type(storage), name, dies)
        with pytest.raises(Killed):
            upload(local(tmp_path, 2))
    complete = at == 3  # all but newest.json
    assert remote().newest() == ("step-2" if complete else "step-1")
    read_checkpoint(remote().fetch(remote().newest() or "", tmp_path / "other"))
    upload(local(tmp_path, 3), keep=1)
    assert {key.partition("/")[0] for key in keys(storage)} == {"newest.json", "step-3"}


def test_upload_of_another_run_is_not_removed(storage: Any, tmp_path: Path) -> None:
    storage.pipe_file("bucket/run/step-1/uploading.json", b'{"run": "other"}')
    storage.pipe_file("bucket/run/step-1/model.safetensors", b"half")
    upload(local(tmp_path, 2))
    assert "step-1/model.safetensors" in keys(storage)
    assert remote().newest() == "step-2"


def test_an_evicted_process_completes_no_checkpoint(storage: Any, tmp_path: Path) -> None:
    def evicted() -> None:
        raise StaleGenerationError("evicted")

    with pytest.raises(StaleGenerationError):
        upload(local(tmp_path, 1), fence=evicted)
    assert steps(storage) == []


def test_another_state_of_the_same_step_replaces_the_first(tmp_path: Path) -> None:
    upload(local(tmp_path, 1, value=1.0))
    upload(local(tmp_path, 1, value=2.0))
    fetched = read_checkpoint(remote().fetch("step-1", tmp_path / "other"))
    assert fetched.state["model"]["weight"].tolist() == [2.0] * 4


def test_a_changed_description_is_uploaded_without_the_files(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(local(tmp_path, 1))
    monkeypatch.setattr(type(storage), "put_file", None)
    upload(local(tmp_path, 1, stopped_early="loader"))
    fetched = read_checkpoint(remote().fetch("step-1", tmp_path / "other"))
    assert fetched.info.stopped_early == "loader"


def test_damaged_object_is_detected(storage: Any, tmp_path: Path) -> None:
    upload(local(tmp_path, 1))
    content = storage.cat_file("bucket/run/step-1/model.safetensors")
    storage.pipe_file("bucket/run/step-1/model.safetensors", content[:-1] + b"x")
    with pytest.raises(CorruptDataError, match="does not match its digest"):
        read_checkpoint(remote().fetch("step-1", tmp_path / "other"))


def test_a_missing_object_is_named(storage: Any, tmp_path: Path) -> None:
    upload(local(tmp_path, 1))
    storage.rm_file("bucket/run/step-1/model.safetensors")
    with pytest.raises(CorruptDataError, match=r"model\.safetensors does not exist"):
        remote().fetch("step-1", tmp_path / "other")


def test_a_list_that_lags_behind_hides_no_checkpoint(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(local(tmp_path, 1))
    monkeypatch.setattr(type(storage), "ls", lambda self, *args, **kw: [])
    assert remote().newest() == "step-1"


def test_keep_spares_the_best_and_other_runs(storage: Any, tmp_path: Path) -> None:
    upload(local(tmp_path, 1, run="other"))
    for step, metric in ((2, 0.9), (3, 0.5), (4, 0.1), (5, 0.2)):
        upload(local(tmp_path, step, metric=metric, mode="max"))
    assert steps(storage) == ["step-1", "step-2", "step-4", "step-5"]
    assert remote().best() == "step-2"
    assert remote().newest("other") == "step-1"


def test_a_later_step_of_another_run_is_refused(tmp_path: Path) -> None:
    upload(local(tmp_path, 9, run="other"))
    with pytest.raises(ConfigurationError, match="step-9 of another run"):
        remote().check_place(5, "r")
    remote().check_place(10, "r")
    remote().check_place(5, "other")


# -------------------------------------------------------------------------------------- in a script


def train(strategy: str, url: str, *, steps: int) -> bool:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    model, optimizer = shoal.as_distributed(
        net, torch.optim.AdamW(net.parameters(), 1e-2), strategy=strategy
    )
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(torch.arange(64.0).reshape(8, 8)), global_batch_size=4
    )
    resumed = shoal.resume(url)
    for _ in loader.epochs(steps // 2):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            shoal.save_checkpoint(url, keep=2, every_steps=2)
    shoal.shutdown()
    return resumed


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "tensor"])
def test_a_run_resumes_from_a_url(strategy: str, storage: Any, tmp_path: Path) -> None:
    """The result equals that of a run without an interruption that saves to a directory."""
    shoal.launch(lambda: train(strategy, str(tmp_path / "whole"), steps=8), world_size=2)
    assert not any(shoal.launch(lambda: train(strategy, URL, steps=4), world_size=2))
    assert steps(storage) == ["step-2", "step-4"]
    assert all(shoal.launch(lambda: train(strategy, URL, steps=8), world_size=2))
    assert steps(storage) == ["step-6", "step-8"]
    whole, resumed = shoal.load_full_state(tmp_path / "whole"), shoal.load_full_state(URL)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    one = shoal.load_full_state(f"{URL}/step-6")
    assert any(not torch.equal(one[name], resumed[name]) for name in one)
    assert not list((tmp_path / "staging").glob("load-*"))


def test_relative_staging_directory_is_resolved_when_shoal_starts(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("SHOAL_STAGING_DIR", "staging")
    monkeypatch.chdir(here)

    def rank() -> None:
        shoal.init()
        os.chdir(elsewhere)
        train("ddp", URL, steps=2)

    shoal.launch(rank, world_size=1)
    assert steps(storage) == ["step-2"]
    assert list((here / "staging").rglob(NAME))
    assert list(elsewhere.iterdir()) == []


def test_removed_checkpoint_does_not_return_from_the_local_disk(
    storage: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shoal.launch(lambda: train("ddp", URL, steps=4), world_size=1)
    remote()._remove("step-4")
    assert all(shoal.launch(lambda: train("ddp", URL, steps=2), world_size=1))
    assert "kept as" in caplog.text
    assert steps(storage) == ["step-2"]


def test_a_single_checkpoint_is_not_resumed_from(storage: Any, tmp_path: Path) -> None:
    upload(local(tmp_path, 1))
    with pytest.raises(ConfigurationError, match="found a single checkpoint"):
        shoal.launch(lambda: train("ddp", f"{URL}/step-1", steps=2), world_size=2)


def test_a_file_url_is_a_plain_directory(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    shoal.launch(lambda: train("fsdp", url, steps=2), world_size=2)
    assert (tmp_path / "run" / "step-2" / NAME).is_file()
    assert all(shoal.launch(lambda: train("fsdp", url, steps=4), world_size=2))
    assert shoal.load_full_state(url).keys() == shoal.load_full_state(tmp_path / "run").keys()


def test_a_model_is_saved_to_and_loaded_from_a_url(storage: Any) -> None:
    def rank() -> list[float]:
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        model, _ = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
        model.save_model("memory://bucket/model.safetensors")
        before = model.full_state_dict()["weight"].flatten().tolist()
        with torch.no_grad():
            net.weight.zero_()
        model.load_model("memory://bucket/model.safetensors")
        assert model.full_state_dict()["weight"].flatten().tolist() == before
        with pytest.raises(ConfigurationError, match=r"nothing.* does not exist"):
            model.load_model("memory://bucket/nothing")
        return before

    assert len(shoal.launch(rank, world_size=2)) == 2
    assert "/bucket/model.safetensors" in storage.store


@pytest.mark.parametrize("call", ["resume", "save_checkpoint"])
def test_storage_errors_are_raised_on_all_ranks(
    call: str, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Any, *args: Any, **kw: Any) -> Any:
        raise PermissionError("no such key")

    monkeypatch.setattr(type(storage), "ls", refused)
    raised: list[str] = []

    def rank() -> None:
        net = nn.Linear(4, 1)
        shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
        try:
            getattr(shoal, call)(URL)
        except ShoalError as error:
            raised.append(error.reason)

    shoal.launch(rank, world_size=2)
    assert raised == ["OBJECT_STORAGE_REFUSED"] * 2


def test_frozen_values_are_copied_within_the_storage(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    plain = type(storage).cp_file

    def copies(self: Any, source: str, target: str, **kw: Any) -> None:
        copied.append(target)
        plain(self, source, target, **kw)

    monkeypatch.setattr(type(storage), "cp_file", copies)

    def rank() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        net[0].requires_grad_(False)
        model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net[1].parameters(), 0.1))
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            shoal.save_checkpoint(URL)
        shoal.shutdown()

    shoal.launch(rank, world_size=1)
    assert copied  # unless one upload has overtaken the saves
    assert json.loads(storage.cat_file("bucket/run/newest.json")) == {"name": "step-3"}
    assert shoal.load_full_state(URL)["0.weight"].shape == (8, 8)
