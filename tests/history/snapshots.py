"""Reads the files that a server has left at its end, for the checks of a history."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


def read_snapshot(path: Path) -> tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]:
    """Returns a snapshot's metadata, and its tensors by name."""
    with safe_open(path, framework="pt") as file:
        names: list[str] = file.keys()
        return json.loads(file.metadata()["shoal"]), {name: file.get_tensor(name) for name in names}
