"""Runs that W&B recorded without a server, read from its files, which are LevelDB logs."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER = 7
"""Size of the header of a file, and of that of a part of a record."""
_BLOCK = 32 * 1024


def environment(directory: Path) -> dict[str, str]:
    """Returns variables that make W&B write to `directory`."""
    return {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(directory),
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
    }


def rows(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each W&B run by its id, in the order in which `wandb sync` reads them."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(directory.glob("wandb/offline-run-*/run-*.wandb")):
        of_run = found.setdefault(file.stem.removeprefix("run-"), [])
        for data in _records(file.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("history"):
                of_run.append(
                    {
                        item.key or "/".join(item.nested_key): json.loads(item.value_json)
                        for item in record.history.item
                    }
                )
    return found


def points(found: list[dict[str, Any]], name: str) -> list[tuple[int, Any]]:
    """Returns the steps and values of one column."""
    return [(row["_step"], row[name]) for row in found if name in row]


def _records(data: bytes) -> Iterator[bytes]:
    position, parts = _HEADER, b""
    while position + _HEADER <= len(data):
        if _BLOCK - position % _BLOCK < _HEADER:  # the rest of a block, without a record
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + _HEADER])
        position += _HEADER
        parts += data[position : position + length]
        position += length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
