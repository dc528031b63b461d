"""Tasks of four ranks of one `shoal_gloo` world (tests/ranks), which run the cases that a test
requests (cases.py, plan_cases.py)."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import shoal_worker.backends.gloo.backend  # noqa: F401 - registers shoal_gloo
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.integration.tensor_parallel import cases, plan_cases

WORLD = 4
CASES = {**vars(cases), **vars(plan_cases)}

_meshes: dict[int, DeviceMesh] = {}
"""Mesh by size: with size 2 there are two meshes, which do the same work."""


def join(rank: int, directory: str) -> None:
    """A task: forms the world, whose ranks meet in `directory`."""
    store = dist.FileStore(str(Path(directory) / "store"), WORLD)
    dist.init_process_group(
        "shoal_gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _meshes.update({2: grid["tp"], 4: init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))})


def run_case(rank: int, case: str, size: int, arguments: dict[str, Any]) -> Any:
    """A task: runs a case on the mesh of `size` ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        return CASES[case](_meshes[size], **arguments)
