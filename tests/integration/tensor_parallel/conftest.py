"""Gives tests functions that run a case on all ranks of one group: processes, which serve all tests of a session, or threads."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shoal_common.processes import tied_to_parent
from shoal_worker.launch import launch
from torch.distributed.device_mesh import init_device_mesh

from tests.integration.tensor_parallel.ranks import CASES

_PATIENCE_S = 60.0


class Ranks:
    """The processes of ranks.py, with a connection to each."""

    def __init__(self, path: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            listener.settimeout(_PATIENCE_S)
            command = [sys.executable, "-m", "tests.integration.tensor_parallel.ranks", path]
            self._process = subprocess.Popen(tied_to_parent(command), env=environment, cwd=Path(__file__).parents[3])
            self._connections = [listener.accept()[0] for _ in range(4)]
        for connection in self._connections:
            connection.settimeout(_PATIENCE_S)
        self._lines = [connection.makefile("rw") for connection in self._connections]
        for lines in self._lines:
            lines.readline()

    def run(self, case: str, size: int, **arguments: Any) -> list[Any]:
        """What each rank says of the case; fails if one failed."""
        for lines in self._lines:
            print(json.dumps({"case": case, "size": size, "arguments": arguments}), file=lines, flush=True)
        said = [json.loads(lines.readline() or '{"error": "the process ended"}') for lines in self._lines]
        errors = [s["error"] for s in said if "error" in s]
        assert not errors, "\n".join(dict.fromkeys(errors))
        return [s["result"] for s in said]

    def close(self) -> None:
        for lines, connection in zip(self._lines, self._connections, strict=True):
            lines.close()
            connection.close()
        self._process.wait(_PATIENCE_S)


@pytest.fixture(scope="session")
def _ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(str(tmp_path_factory.mktemp("tensor-parallel") / "socket"))
    yield ranks
    ranks.close()


@pytest.fixture
def run(_ranks: Ranks) -> Callable[..., list[Any]]:
    """run(case, size, **arguments): on groups of `size` ranks; what each of the four ranks returned."""
    return _ranks.run


@pytest.fixture
def run_threads() -> Callable[..., None]:
    """run_threads(case, **arguments): on two ranks that are threads of this process, which is quicker."""

    def run(case: str, **arguments: Any) -> None:
        launch(lambda: CASES[case](init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), **arguments), world_size=2)

    return run
