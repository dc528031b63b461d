"""Files of tensors are safetensors files whose digest is known without reading them."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors
import torch
import xxhash
from safetensors.torch import load_file
from shoal_worker.checkpoint import tensor_writer
from shoal_worker.checkpoint.tensor_writer import write_tensor_file
from shoal_worker.state.serial import STORED_DTYPES


@pytest.fixture
def small_limit() -> Iterator[None]:
    """Limits files of this process to 1 MiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_safetensors_reads_every_dtype_and_shape(tmp_path: Path) -> None:
    tensors = {
        f"{shape}/{str(dtype).removeprefix('torch.')}": torch.arange(torch.Size(shape).numel())
        .reshape(shape)
        .to(dtype)
        for dtype in STORED_DTYPES
        for shape in ((), (0,), (3,), (2, 5))
    }
    path = tmp_path / "all.safetensors"
    about = write_tensor_file(path, tensors, {"ünï": 'a "quoted" line\n'})
    content = path.read_bytes()
    assert about == {"bytes": len(content), "xxh3_64": xxhash.xxh3_64_hexdigest(content)}
    back = load_file(path)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    with safetensors.safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"ünï": 'a "quoted" line\n'}


def test_tensors_of_many_blocks_are_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_writer, "_BLOCK", 1000)
    monkeypatch.setattr(tensor_writer, "_DROPPED_EVERY", 3000)
    tensors = {f"t{number}": torch.randn(number * 77 + 1) for number in range(20)}
    path = tmp_path / "blocks.safetensors"
    about = write_tensor_file(path, tensors)
    assert about["xxh3_64"] == xxhash.xxh3_64_hexdigest(path.read_bytes())
    assert all(torch.equal(tensors[name], tensor) for name, tensor in load_file(path).items())


def test_the_reserved_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="__metadata__"):
        write_tensor_file(tmp_path / "file.safetensors", {"__metadata__": torch.ones(3)})


def test_an_existing_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write_tensor_file(path, {"a": torch.ones(1000)})
    about = write_tensor_file(path, {"a": torch.zeros(3)})
    assert about["bytes"] == path.stat().st_size
    assert torch.equal(load_file(path)["a"], torch.zeros(3))


def test_file_that_becomes_too_large_is_a_disk_error(tmp_path: Path, small_limit: None) -> None:
    """The kernel writes only a part of the last block before it reports the error."""
    with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        write_tensor_file(tmp_path / "file.safetensors", {"a": torch.ones(1 << 19)})


def test_full_disk_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "full.safetensors").symlink_to("/dev/full")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write_tensor_file(tmp_path / "full.safetensors", {"a": torch.ones(10)})
