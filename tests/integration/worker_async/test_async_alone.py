"""`python train.py` without a cluster: async_sgd starts its own services and stops them when it
ends."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import shoal_worker.api as shoal
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.elastic.session.worker_process import find_session, set_session
from torch import nn

from tests.integration.worker_async.async_cluster import Worker
from tests.zygote.children import Zygote

SCRIPT = """
import sys
import shoal_worker.api as shoal
import torch
from torch import nn

torch.manual_seed(0)
inputs = torch.randn(64, 4)
targets = inputs.sum(dim=1, keepdim=True)
net = nn.Linear(4, 1)
model, optimizer = shoal.as_distributed(
    net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5), strategy="async_sgd"
)
loader = shoal.ElasticDataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=16)
steps = 0
for epoch in loader.epochs(20):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        assert optimizer.step()
        optimizer.zero_grad()
        steps += 1
print("steps", steps, "loss", round(loss.item(), 3), flush=True)
sys.stdin.read()
"""
PATIENCE_S = 60.0


@pytest.fixture
def script(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")
    }
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**environment, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    yield process
    process.kill()
    process.communicate()


def trained(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Waits until the script has trained; returns its services."""
    assert process.stdout is not None
    assert process.stdout.readline() == "steps 80 loss 0.0\n", process.communicate()[1]
    return services_of(process.pid)


def services_of(pid: int) -> list[psutil.Process]:
    """Returns the coordinator, its Valkey and the server, without the processes that clean up
    temporary directories."""
    children = psutil.Process(pid).children(recursive=True)
    services = [
        child
        for child in children
        if not Path(child.cmdline()[-1]).name.startswith("shoal-scratch-")
    ]
    assert len(services) == 3
    return services


@pytest.mark.slow
def test_services_are_gone_once_the_script_has_ended(
    script: subprocess.Popen[str], tmp_path: Path
) -> None:
    services = trained(script)
    _, errors = script.communicate("", timeout=PATIENCE_S)
    assert script.returncode == 0, errors
    assert errors == ""
    assert not any(service.is_running() for service in services)
    assert [path.name for path in tmp_path.iterdir() if "shoal" in path.name] == []


@pytest.mark.slow
def test_services_end_with_a_killed_process(zygote: Zygote, tmp_path: Path) -> None:
    directory = tmp_path / "worker"
    directory.mkdir()
    config = json.dumps({"directory": str(directory), "hold_at": [1]})
    worker = Worker(zygote.start("train", [config], output=directory / "log"), directory)
    worker.wait_step(1)
    services = services_of(worker.process.pid)
    (files,) = {
        Path(argument).parent
        for service in services
        for argument in service.cmdline()
        if argument.endswith(".json")
    }
    worker.process.kill()
    assert worker.process.wait() == -signal.SIGKILL
    _, alive = psutil.wait_procs(services, timeout=PATIENCE_S)
    assert not alive
    give_up_at = time.monotonic() + 10
    while files.exists():  # it could not remove its files; the cleanup process does
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_missing_service_distributions_are_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The error message of a machine on which the services are not installed.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    net = nn.Linear(2, 1)
    assert find_session() is None
    try:
        with pytest.raises(
            ConfigurationError, match="pip install shoal-coordinator shoal-ps-server"
        ):
            shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1), strategy="async_sgd")
    finally:
        set_session(None)


@pytest.mark.slow
def test_the_examples_of_sparse_tables_run(tmp_path: Path) -> None:
    """The second example reads the checkpoint that the first one saved."""
    page = (Path(__file__).parents[3] / "docs" / "sparse-tables.md").read_text()
    train, read = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    run(train, tmp_path)
    assert re.fullmatch(r"(512|51[01]) users; \(100000, 16\)\n", run(read, tmp_path))


def run(example: str, tmp_path: Path) -> str:
    """Runs an example and returns its output."""
    path = tmp_path / "train.py"
    path.write_text(example)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")
    }
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env={**environment, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
