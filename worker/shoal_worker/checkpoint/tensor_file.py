"""One safetensors file of a checkpoint: written with its size and digest told, read only if both are as they were told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import safetensors
import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError
from shoal_common.errors import UnavailableError

from shoal_worker.checkpoint.manifest import damaged, sync_file

SUFFIX: Final = ".safetensors"
STORED_DTYPES: Final = frozenset(
    getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    )
)
"""What every reader of safetensors understands; other dtypes are stored as their bytes."""
_READ_BLOCK = 8 << 20


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor` as it lies in a file."""
    return tensor if tensor.dtype in STORED_DTYPES else tensor.reshape(-1).view(torch.uint8)


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> dict[str, Any]:
    """Writes contiguous CPU tensors and waits until they are on the disk. Returns {"bytes", "xxh3_64"} of the file.

    Raises:
        OSError, SafetensorError: the disk is full or failing.
    """
    safetensors.torch.save_file({name: stored(tensor) for name, tensor in tensors.items()}, file, metadata)
    sync_file(file)
    return {"bytes": file.stat().st_size, "xxh3_64": _digest(file)}


def file_of(path: Path, name: str, about: Mapping[str, Any]) -> Path:
    """`path/name.safetensors`, if it is of the size that `write_tensors` told.

    Raises:
        CorruptDataError: it is not.
    """
    if "/" in name:
        raise damaged(path, f"it names a file {name!r} elsewhere")
    file = path / f"{name}{SUFFIX}"
    try:
        size = file.stat().st_size
    except OSError as error:
        raise damaged(path, f"{file.name} cannot be read: {error}") from error
    if size != about["bytes"]:
        raise damaged(path, f"{file.name} has {size} bytes, {about['bytes']} were written")
    return file


def read_tensors(path: Path, name: str, about: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of `path/name.safetensors` and its metadata, if it is what `write_tensors` told.

    Raises:
        CorruptDataError: it is not.
    """
    file = file_of(path, name, about)
    try:
        if _digest(file) != about["xxh3_64"]:
            raise damaged(path, f"{file.name} does not match its digest")
        with safetensors.safe_open(file, framework="pt") as opened:
            # Copied: the library maps the file, and a mapping must not outlive it.
            tensors = {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118 (no mapping: it has only keys())
            return tensors, opened.metadata() or {}
    except (OSError, SafetensorError, ValueError) as error:
        raise damaged(path, f"{file.name} cannot be read: {error}") from error


@contextlib.contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """What the disk has against `target` comes out as UnavailableError (CHECKPOINT_NOT_WRITTEN)."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # the library reports a full disk as its own error
        raise UnavailableError(f"checkpoint {target} could not be written: {error}", reason="CHECKPOINT_NOT_WRITTEN") from error


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_64()
    with file.open("rb") as opened:
        while block := opened.read(_READ_BLOCK):
            digest.update(block)
    return digest.hexdigest()
