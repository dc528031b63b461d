"""Checkpoints on real servers of each kind, under their faults: overload, silence, cut and
shortened uploads, and refusals. test_s3.py has cases for S3 alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError, PermissionDeniedError, UnavailableError
from shoal_worker.checkpoint.manifest import NAME
from shoal_worker.checkpoint.remote import RemoteCheckpoints
from shoal_worker.object_storage import ObjectFolder
from torch import nn

from tests.gcs_server import gcs_server
from tests.integration.common.storages import Storage, connected, train
from tests.s3_server import s3_server
from tests.storage_server import StorageServer

MOMENT = timedelta(seconds=1)
_MB = 1 << 20
_FILE = 120 * _MB
"""Size of each of the three files of a large checkpoint, in bytes."""
_LIMIT = 280 * _MB
"""Memory for a transfer, in bytes. The page says 200 MB."""


@pytest.fixture(scope="module", params=["s3", "gs"])
def running(request: pytest.FixtureRequest) -> Iterator[tuple[str, StorageServer]]:
    """The scheme of a kind of storage, and its server."""
    with s3_server() if request.param == "s3" else gcs_server() as server:
        yield request.param, server


@pytest.fixture
def storage(
    running: tuple[str, StorageServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Storage:
    """A folder in a storage without faults, and an environment in which clients use it."""
    scheme, server = running
    return connected(scheme, server, tmp_path, monkeypatch)


def test_keep_removes_older_checkpoints(storage: Storage) -> None:
    for step in range(1, 5):
        storage.upload(step)
    assert storage.folder().names() == ["newest.json", "step-3", "step-4"]
    assert storage.folder().child("step-2").names() == []


@pytest.mark.parametrize("action", ["refuse", "hang", "cut"])
@pytest.mark.parametrize("text", ["model.safetensors", NAME])
def test_transient_fault_fails_nothing(storage: Storage, action: str, text: str) -> None:
    storage.set_faults({"action": action, "method": "PUT", "text": text})
    path = storage.upload(1, silence=timedelta(seconds=3))
    assert len(storage.requests("PUT", f"{storage.name}/step-1/{text}")) >= 2
    storage.check_newest(1, path)


def test_silent_storage_ends_every_kind_of_request(storage: Storage) -> None:
    path = storage.upload(1)
    storage.set_faults({"action": "hang", "text": storage.name, "times": 10_000})
    folder = storage.folder(patience=MOMENT, silence=MOMENT)
    silent = "nothing was transferred for 1 s"
    with pytest.raises(UnavailableError, match=silent):
        folder.names()  # connects, for all requests
    requests: tuple[Callable[[], object], ...] = (
        lambda: folder.read("newest.json"),
        lambda: folder.write("other", b"1"),
        lambda: folder.remove(["newest.json"]),
        lambda: folder.download("newest.json", storage.directory / "file", 1),
        lambda: folder.copy(folder.child("step-1"), NAME, 1),
    )
    with ThreadPoolExecutor(len(requests)) as threads:
        for future in [threads.submit(request) for request in requests]:
            with pytest.raises(UnavailableError, match=silent):
                future.result()
    storage.set_faults()
    storage.check_newest(1, path)


def test_truncated_upload_is_detected_and_repeated(storage: Storage) -> None:
    storage.set_faults({"action": "shorten", "method": "PUT", "text": "model.safetensors"})
    path = storage.upload(1)
    assert len(storage.requests("PUT", f"{storage.name}/step-1/model.safetensors")) == 2
    storage.check_newest(1, path)


def test_overloaded_storage_leaves_no_checkpoint(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.set_faults({"action": "refuse", "method": "PUT", "text": "model", "times": 10_000})
    with pytest.raises(UnavailableError, match="it was repeated for 1 s") as raised:
        storage.upload(1, patience=MOMENT, silence=MOMENT)
    assert raised.value.reason == "OBJECT_STORAGE_UNAVAILABLE"
    assert storage.remote().newest() is None


def test_a_refused_request_is_not_repeated(storage: Storage) -> None:
    storage.set_faults({"action": "forbid", "method": "PUT", "text": "model", "times": 10_000})
    with pytest.raises(PermissionDeniedError, match="check the credentials") as raised:
        storage.upload(1)
    assert raised.value.reason == "OBJECT_STORAGE_REFUSED"
    assert len(storage.requests("PUT", f"{storage.name}/step-1/model")) == 1


def test_a_missing_bucket_is_named(storage: Storage) -> None:
    scheme = storage.bucket.partition(":")[0]
    folder = ObjectFolder(f"{scheme}://no-such-bucket/run")
    with pytest.raises(ConfigurationError, match="expected an existing bucket"):
        RemoteCheckpoints(folder).upload(storage.local(1), keep=1, fence=lambda: None)


def test_an_object_is_copied_within_the_storage(storage: Storage) -> None:
    one, other = storage.folder().child("one"), storage.folder().child("other")
    one.write("file", b"content")
    other.copy(one, "file", 7)
    assert other.read("file") == b"content"
    assert (other.size("file"), other.size("none"), other.read("none")) == (7, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("running", ["s3"], indirect=True)  # gcsfs needs little memory by itself
@pytest.mark.parametrize("direction", ["up", "down"])
def test_transfers_need_little_memory(storage: Storage, direction: str, tmp_path: Path) -> None:
    """Three files are transferred at a time, each larger than the part of it that is in memory."""
    storage.upload(0)  # imports the client
    path = storage.local(1, elements=_FILE // 4, files=3)

    def transfer() -> None:
        if direction == "up":
            storage.remote().upload(path, keep=1, fence=lambda: None)
        else:
            storage.remote().fetch("step-1", tmp_path / "other")

    if direction == "down":
        storage.remote().upload(path, keep=1, fence=lambda: None)
    needed = memory_for(transfer)
    assert needed < _LIMIT, f"{needed / _MB:.0f} MiB"


def memory_for(work: Callable[[], object]) -> int:
    """Returns the number of bytes by which this process grows during a call, at most."""

    def resident(name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
        assert found is not None
        return int(found[1]) << 10

    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is the largest VmRSS since then
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def test_run_resumes_from_the_storage(storage: Storage) -> None:
    assert not any(shoal.launch(lambda: train(storage.url, 1), world_size=2))
    assert all(shoal.launch(lambda: train(storage.url, 2), world_size=3))
    assert storage.remote().newest() == "step-4"
    assert shoal.load_full_state(storage.url)["weight"].shape == (1, 8)


def test_script_of_the_page_runs(storage: Storage) -> None:
    page = (Path(__file__).parents[3] / "docs/guides/object-storage.md").read_text()
    (script,) = re.findall(r'```python title="train.py"\n(.*?)```', page, re.DOTALL)
    script = script.replace("s3://my-bucket/run", storage.url)

    def rank() -> None:
        names: dict[str, object] = {"__name__": "__main__"}
        exec(compile(script, "object-storage.md", "exec"), names)

    shoal.launch(rank, world_size=2)
    assert storage.folder().names() == ["model.safetensors", "newest.json", "step-12", "step-8"]
    assert shoal.load_full_state(f"{storage.url}/step-8").keys() == (
        shoal.load_full_state(storage.url).keys()
    )


def test_model_is_loaded_from_the_storage(storage: Storage) -> None:
    def rank() -> None:
        net = nn.Linear(4, 1)
        model, _ = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
        model.save_model(f"{storage.url}/model.safetensors")
        before = model.full_state_dict()["weight"].clone()
        with torch.no_grad():
            net.weight.zero_()
        model.load_model(f"{storage.url}/model.safetensors")
        assert torch.equal(model.full_state_dict()["weight"], before)
        with pytest.raises(ConfigurationError, match=r"nothing.* does not exist"):
            model.load_model(f"{storage.url}/nothing")

    shoal.launch(rank, world_size=2)
