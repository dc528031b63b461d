"""torchrun itself, with Shoal's coordinator for its rendezvous, and its scripts with
init_method="redis://..."."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from shoal.launcher.clusters.cluster import Service
from shoal.launcher.processes.process import stop_all

Shell = Any  # of tests/integration/conftest.py
Command = Any

SUM = """
import os, torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
os.write(
    1, f"sum {int(total.item())} rank {dist.get_rank()}\\n".encode()
)  # in one piece: workers share the pipe
"""
STAYS = """
import pathlib, time
while not pathlib.Path("done").exists():
    time.sleep(0.01)
dist.destroy_process_group()
"""


@pytest.fixture
def coordinator(shell: Shell, tmp_path: Path) -> Iterator[Service]:
    (directory := tmp_path / "coordinator").mkdir()
    service = Service(
        "coordinator", "shoal_coordinator", [], directory=directory, environment=shell.environment
    )
    service.start()
    service.wait_ready(timedelta(seconds=90))
    yield service
    stop_all([service.child], grace=timedelta(seconds=10))
    service.release()


def torchrun(
    shell: Shell, coordinator: Service, script: Path, *flags: str, nodes: str = "2"
) -> Command:
    where = (
        "--nnodes",
        nodes,
        "--rdzv-backend",
        "shoal",
        "--rdzv-endpoint",
        coordinator.address,
        "--rdzv-id",
        "job",
    )
    return shell.start_program(
        sys.executable, "-m", "torch.distributed.run", *where, *flags, script
    )


def test_torchrun_agents_rendezvous_at_the_coordinator(shell: Shell, coordinator: Service) -> None:
    script = shell.script(SUM + "dist.destroy_process_group()\n")
    agents = [torchrun(shell, coordinator, script) for _ in range(2)]
    assert [agent.wait() for agent in agents] == [0, 0], [agent.stderr for agent in agents]
    assert sorted(agent.stdout.strip() for agent in agents) == ["sum 2 rank 0", "sum 2 rank 1"]


@pytest.mark.slow
@pytest.mark.fresh
def test_arriving_and_leaving_agents_make_the_others_restart_their_workers(
    shell: Shell, coordinator: Service
) -> None:
    script = shell.script(SUM + STAYS)
    flags = ("--rdzv-conf", "last_call_timeout=0.1", "--max-restarts", "3")
    first = torchrun(shell, coordinator, script, *flags, nodes="1:2")
    first.wait_for_output("sum 1 rank 0")
    second = torchrun(shell, coordinator, script, *flags, nodes="1:2")
    second.wait_for_output("sum 2")
    first.wait_for_output("sum 2")
    for process in (*psutil.Process(second.process.pid).children(recursive=True), second.process):
        process.send_signal(signal.SIGKILL)
    first.wait_for(lambda: first.stdout.count("sum 1 rank 0") == 2, "a start alone")
    (shell.directory / "done").touch()
    assert first.wait() == 0, first.stderr


@pytest.mark.slow
def test_torchrun_script_rendezvous_at_redis(shell: Shell, coordinator: Service) -> None:
    meets = SUM.replace('"gloo")', f'"gloo", init_method="{coordinator.addresses.redis}/job")')
    script = shell.script("import shoal\n" + meets + "dist.destroy_process_group()\n")
    agent = torchrun(shell, coordinator, script, "--nproc-per-node", "2", nodes="1")
    assert agent.wait() == 0, agent.stderr
    assert sorted(agent.stdout.splitlines()) == ["sum 2 rank 0", "sum 2 rank 1"]
