"""A model as bytes, or as one file: safetensors with Shoal's metadata in its header. No pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import safetensors
import safetensors.torch
import torch
from shoal_common.errors import CorruptDataError

_KEY = "shoal"
_FORMAT = 1


def dump_tensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> bytes:
    """Tensors by name and JSON-able metadata as one safetensors image. Tied tensors are written once per name."""
    seen: set[int] = set()
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory.
        plain[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(plain[name].data_ptr())
    return safetensors.torch.save(plain, metadata={_KEY: json.dumps({"format": _FORMAT, **metadata})})


def load_tensors(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Inverse of `dump_tensors`.

    Raises:
        CorruptDataError: truncated, not a safetensors image, not written by Shoal, or by a newer release.
    """
    try:
        tensors = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length]).get("__metadata__", {})
        metadata: dict[str, Any] = json.loads(header[_KEY])
    except KeyError:
        raise CorruptDataError(
            "a safetensors file, but not one that Shoal wrote: its metadata lacks 'shoal'", reason="FILE_FOREIGN"
        ) from None
    except (safetensors.SafetensorError, ValueError, UnicodeDecodeError) as error:
        raise CorruptDataError(f"not a complete safetensors file: {error}", reason="FILE_CORRUPT") from error
    if metadata.get("format") != _FORMAT:
        raise CorruptDataError(
            f"the file has format {metadata.get('format')!r}, this release reads {_FORMAT}; use the release that wrote it",
            reason="FILE_NEWER",
        )
    return tensors, metadata
