"""Converts a model's or optimizer's state to bytes or a single file, and back: safetensors with
Shoal's metadata in the header, without pickle.

The metadata contains a digest of itself and of all tensors, so any damage is detected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import safetensors
import safetensors.torch
import torch
import xxhash
from shoal_common.errors import ConfigurationError, CorruptDataError, ShoalError

from shoal_worker.object_storage import is_url, local_path, read_object, write_object
from shoal_worker.state.digest import tensor_digest

METADATA: Final = "shoal"
"""Key of Shoal's metadata in a file's header."""
_FORMAT = 1
AS_BYTES: Final = "as_bytes"
"""Metadata key for the dtypes and shapes of tensors that are stored as bytes."""
STORED_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.complex64: "C64",
    torch.bool: "BOOL",
}
"""Dtypes that every reader of safetensors supports, and their names in the format. Tensors of other
dtypes are stored as bytes."""


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor` as files store it: unchanged if its dtype is in `STORED_DTYPES`, otherwise
    as a flat view of its bytes."""
    return tensor if tensor.dtype in STORED_DTYPES else tensor.reshape(-1).view(torch.uint8)


def dump_tensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> bytes:
    """Encodes named tensors in the safetensors format, with `metadata` as JSON in the header. A
    tied tensor is written once for each of its names."""
    seen: set[int] = set()
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        # safetensors rejects tensors that share memory.
        plain[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(plain[name].data_ptr())
    content = {"format": _FORMAT, **metadata}
    as_bytes = {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in plain.items()
        if tensor.dtype not in STORED_DTYPES
    }
    if as_bytes:
        content[AS_BYTES] = as_bytes
        plain = {name: stored(tensor) for name, tensor in plain.items()}
    document = {"xxh3_64": _digest(content, plain), **content}
    return safetensors.torch.save(plain, metadata={METADATA: json.dumps(document)})


def load_tensors(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Decodes the result of `dump_tensors`. Returns the tensors and the metadata.

    Raises:
        CorruptDataError: the data is truncated or damaged, is not in the safetensors format, or was
            written by other software or a newer release.
    """
    try:
        tensors = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length]).get("__metadata__", {})
        document: dict[str, Any] = json.loads(header[METADATA])
    except KeyError:
        raise CorruptDataError(
            "this is a safetensors file, but Shoal did not write it: its metadata lacks 'shoal'",
            reason="FILE_FOREIGN",
        ) from None
    except (safetensors.SafetensorError, ValueError, RecursionError) as error:
        raise CorruptDataError(
            f"this is not a complete safetensors file: {error}", reason="FILE_CORRUPT"
        ) from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        found = document.get("format") if isinstance(document, dict) else document
        raise CorruptDataError(
            f"the file has format {found!r}, but this release reads format {_FORMAT}; use the "
            "release that wrote it",
            reason="FILE_NEWER",
        )
    written = document.pop("xxh3_64", None)
    if written != _digest(document, tensors):
        raise CorruptDataError(
            "the file is damaged: its content does not match its digest; use an intact copy",
            reason="FILE_CORRUPT",
        )
    for name, (dtype, shape) in document.pop(AS_BYTES, {}).items():
        tensors[name] = tensors[name].view(getattr(torch, dtype)).view(shape)
    return tensors, document


def read_tensors(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Reads a file or object written by `write_file` and returns its tensors and metadata, like
    `load_tensors`.

    Raises:
        ConfigurationError: the file cannot be opened.
        ShoalError: the object at a URL cannot be read; raised as by `ObjectFolder`.
        CorruptDataError: as in `load_tensors`; the message names the file.
    """
    try:
        data = read_object(str(path)) if is_url(path) else local_path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error}; pass a file written by save_model"
        ) from error
    try:
        return load_tensors(data)
    except CorruptDataError as error:
        raise CorruptDataError(f"{path}: {error}", reason=error.reason) from error


def write_file(path: str | Path, data: bytes) -> str | None:
    """Writes a file, or an object at a URL, atomically. Returns None if the write has succeeded,
    otherwise the text of the error."""
    if isinstance(path, str):
        try:
            write_object(path, data)
        except ShoalError as error:
            return str(error)
        return None
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        return f"{path} cannot be written: {error}"
    return None


def _digest(content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    return xxhash.xxh3_64_hexdigest(
        json.dumps([content, digests], sort_keys=True, separators=(",", ":")).encode()
    )
