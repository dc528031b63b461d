"""Writes a safetensors file block by block, directly from the tensors' memory.

The library's own writer leaves the complete file in the page cache. Allocating those pages for a
large state takes most of a save's CPU time, on cores that training needs. Here, each range of the
file is flushed to the disk and then dropped from the page cache, so the kernel reuses the same few
pages. The file's digest is computed while writing, without reading the file again.

Format: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import xxhash

from shoal_worker.state.device_reader import bytes_in
from shoal_worker.state.serial import STORED_DTYPES

_BLOCK: Final = 1 << 20
_DROPPED_EVERY: Final = 32 << 20
"""Bytes after which the file is flushed to the disk and dropped from the page cache."""
_METADATA: Final = "__metadata__"
_ALIGNMENT: Final = 8
"""Alignment of the first tensor in a file, in bytes."""


def write_tensor_file(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Writes or replaces a safetensors file and waits until it is on the disk. Returns its size and
    digest: {"bytes", "xxh3_64"}.

    Args:
        tensors: contiguous CPU tensors with dtypes in `STORED_DTYPES`.

    Raises:
        OSError: the disk is full or failing.
        ValueError: a tensor has the name that the format reserves for metadata.
    """
    if _METADATA in tensors:
        raise ValueError(f"a tensor has the reserved name {_METADATA!r}")
    # In descending order of their elements' sizes, all tensors are aligned.
    ordered = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    with _Output(path) as output:
        output.write(_header({name: tensors[name] for name in ordered}, metadata))
        for name in ordered:
            output.write(bytes_in(tensors[name]).numpy().data)
        return output.finish()


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> memoryview:
    content: dict[str, Any] = {} if metadata is None else {_METADATA: dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        content[name] = {
            "dtype": STORED_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return memoryview(len(text).to_bytes(8, "little") + text)


class _Output:
    """A file that is written once, from beginning to end. Every method raises OSError."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self._digest = xxhash.xxh3_64()
        self._written = 0
        self._dropped = 0

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write(self, data: memoryview) -> None:
        """Appends `data`."""
        for begin in range(0, len(data), _BLOCK):
            block = data[begin : begin + _BLOCK]
            self._digest.update(block)
            while block:
                count = os.write(self._descriptor, block)
                block = block[count:]
                self._written += count
            if self._written - self._dropped >= _DROPPED_EVERY:
                os.fdatasync(self._descriptor)
                self._forget()

    def finish(self) -> dict[str, Any]:
        """Waits until the file is on the disk. Returns its size and digest."""
        os.fsync(self._descriptor)
        self._forget()
        return {"bytes": self._written, "xxh3_64": self._digest.hexdigest()}

    def _forget(self) -> None:
        """Drops the data that has been flushed to the disk from the page cache."""
        length = self._written - self._dropped
        with contextlib.suppress(OSError):  # only a hint
            os.posix_fadvise(self._descriptor, self._dropped, length, os.POSIX_FADV_DONTNEED)
        self._dropped = self._written
