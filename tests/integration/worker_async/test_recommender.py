"""The recommender example comes close to the best AUC that its click log allows, and trains a table
larger than the memory of a worker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.worker_async.async_cluster import AsyncCluster

EXAMPLE = Path(__file__).parents[3] / "examples" / "recommender.py"
MEBIBYTE = 1 << 20
ROOM = 96 * MEBIBYTE
"""Limit on the growth of the worker's memory after its first step."""

SCRIPT = """
import resource
import sys
import shoal_worker.api as shoal
import torch
from shoal_common.optimizers.for_torch import RowWiseAdagrad
from shoal_worker.sparse_tables.embedding import SparseEmbedding
from torch import nn

room, rows, dim, step = (int(argument) for argument in sys.argv[1:])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = SparseEmbedding(
            rows, dim, name="table", optimizer=RowWiseAdagrad, initializer="uniform"
        )
        self.out = nn.Linear(dim, 1)

    def forward(self, ids):
        return self.out(self.table(ids))


def train(ids):
    optimizer.zero_grad()
    model(ids).square().mean().backward()
    optimizer.step()


shoal.init()
net = Model()
model, optimizer = shoal.as_distributed(
    net, torch.optim.SGD(net.parameters(), 0.1), strategy="async_sgd"
)
train(torch.arange(step))
with open("/proc/self/status") as status:
    now = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (now + room, resource.RLIM_INFINITY))
try:
    nn.Embedding(rows, dim)
except RuntimeError as error:
    print("no room for it here:", str(error)[:60])
for begin in range(step, rows, step):
    train(torch.arange(begin, min(begin + step, rows)))
print("trained", rows, "rows", flush=True)
sys.stdin.read()
"""


def run(*options: str, servers: int = 2) -> list[tuple[float, float]]:
    """Runs the example on its own servers; returns each epoch's AUC and the best possible AUC."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")
    }
    command = [
        sys.executable,
        "-m",
        "shoal",
        "up",
        "--workers",
        "2",
        "--servers",
        str(servers),
        str(EXAMPLE),
    ]
    ended = subprocess.run(
        [*command, "--users", "200", "--items", "100", *options],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    return [
        (float(reached), float(best))
        for reached, best in re.findall(r"AUC ([\d.]+) of ([\d.]+)", ended.stdout)
    ]


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=pytest.mark.matrix),
        pytest.param("async_sgd", marks=pytest.mark.slow),
    ],
)
def test_recommender_approaches_the_optimum_of_its_log(strategy: str) -> None:
    found = run("--strategy", strategy, "--samples", "40000", "--epochs", "3")
    assert len(found) == 3
    reached, best = found[-1]
    assert 0.85 < best < 0.92
    assert best - 0.04 < reached < best


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=pytest.mark.matrix),
        pytest.param("async_sgd", marks=pytest.mark.slow),
    ],
)
def test_recommender_resumes_from_a_checkpoint_as_if_its_servers_had_survived(
    tmp_path: Path, strategy: str
) -> None:
    """On new servers the model equals the saved one. Only the updates that follow depend on the
    order of the workers, as always under async_sgd."""
    options = ["--strategy", strategy, "--samples", "20000"]
    saved = ["--checkpoints", str(tmp_path / "saved")]
    (_, before), (resumed, after) = (
        run(*options, *saved, "--epochs", "2"),
        run(*options, *saved, "--epochs", "3", servers=1),
    )
    # the other worker may have pushed a little more
    assert resumed[0] == pytest.approx(before[0], abs=1e-3 if strategy == "ddp" else 1e-2)
    assert after[0] > before[0]
    if strategy == "ddp":
        assert after[0] == pytest.approx(run(*options, "--epochs", "3")[-1][0], abs=2e-3)


@pytest.mark.slow
def test_table_larger_than_a_workers_memory_limit_is_trained_entirely(
    cluster: Callable[..., AsyncCluster], tmp_path: Path
) -> None:
    """The worker's address space is limited (RLIMIT_AS). A local embedding of the same size would
    not fit into it."""
    rows, dim, step = 1_000_000, 32, 20_000
    running = cluster(servers=2, keeps_data=False)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")
    }
    worker = subprocess.Popen(
        [sys.executable, str(script), *map(str, (ROOM, rows, dim, step))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **environment,
            "SHOAL_COORDINATOR": running.coordinator.address,
            "SHOAL_JOB_ID": running.job_id,
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "1",  # an arena takes 64 MiB of address space
        },
    )
    try:
        assert worker.stdout is not None
        said = [worker.stdout.readline() for _ in range(2)]
        assert said[0].startswith("no room for it here"), (said, worker.communicate()[1])
        assert said[1] == f"trained {rows} rows\n", (said, worker.communicate()[1])
        assert sum(server.look().stored_bytes for server in running.servers) > rows * dim * 4 > ROOM
        worker.communicate(timeout=60)
        assert worker.returncode == 0
    finally:
        worker.kill()
        worker.communicate()
