"""Four ranks of one `shoal_gloo` world that run cases (cases.py, state_cases.py), as a test tells them.

Run as a module with the path of a Unix socket: imports torch once, forks the ranks, each of which connects there and says its rank; then
one JSON object a line: {"case": name, "size": 2 or 4, "arguments": {...}} -> {"result": ...} or {"error": traceback}. With size 2 the
ranks are two groups that do the same.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import shoal_worker.backends.torch_backend  # noqa: F401 - registers shoal_gloo
import torch
import torch._dynamo  # which the first DTensor would import, on each rank
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.integration.tensor_parallel import cases, state_cases

WORLD = 4
CASES = {**vars(cases), **vars(state_cases)}


def main(path: str) -> None:
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory() as directory:
        children = [pid for rank in range(WORLD) if (pid := fork(rank, path, Path(directory) / "store"))]
        for pid in children:
            os.waitpid(pid, 0)


def fork(rank: int, path: str, store: Path) -> int:
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
        try:
            serve(rank, path, store)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    return pid


def serve(rank: int, path: str, store: Path) -> None:
    dist.init_process_group(
        "shoal_gloo", store=dist.FileStore(str(store), WORLD), rank=rank, world_size=WORLD, timeout=timedelta(seconds=20)
    )
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    meshes = {2: grid["tp"], 4: init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))}
    state_cases.replicas = grid["dp"].get_group()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rw") as lines:
            print(json.dumps({"rank": rank}), file=lines, flush=True)
            for line in lines:
                command = json.loads(line)
                try:
                    said = {"result": CASES[command["case"]](meshes[command["size"]], **command["arguments"])}
                except BaseException:
                    said = {"error": traceback.format_exc()}
                print(json.dumps(said), file=lines, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
