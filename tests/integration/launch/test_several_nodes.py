"""Launchers that share a coordinator, as on several machines; here all are on one."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from shoal.launcher.cluster import Service
from shoal.launcher.process import stop_all

Shell = Any  # of tests/integration/conftest.py
Command = Any

PLACE = """
import os
print(*map(os.environ.get, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT")), flush=True)
"""


@pytest.fixture
def endpoint(shell: Shell, tmp_path: Path) -> Iterator[str]:
    """Of a coordinator that belongs to no launcher."""
    directory = tmp_path / "coordinator"
    directory.mkdir()
    arguments = ["--redis", f"embedded://{directory / 'redis'}"]
    service = Service("coordinator", "shoal_coordinator", arguments, directory=directory, environment=shell.environment)
    service.start()
    service.wait_ready(timedelta(seconds=90))
    yield service.address
    stop_all([service.child], grace=timedelta(seconds=10))
    service.release()


def places(command: Command) -> list[list[str]]:
    return [line.split()[1:] for line in command.stdout.splitlines()]


def test_launchers_agree_on_the_ranks_of_their_workers(shell: Shell, endpoint: str) -> None:
    script = shell.script(PLACE)
    nodes = [shell.start("run", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-endpoint", endpoint, script) for _ in range(2)]
    assert [node.wait() for node in nodes] == [0, 0], [node.stderr for node in nodes]
    lines = [line for node in nodes for line in places(node)]
    assert sorted(line[:5] for line in lines) == [
        ["0", "4", "0", "0", "2"],
        ["1", "4", "1", "0", "2"],
        ["2", "4", "0", "1", "2"],
        ["3", "4", "1", "1", "2"],
    ]
    assert len({line[5] for line in lines}) == 1


def test_all_reduce_over_two_launchers(shell: Shell, endpoint: str) -> None:
    script = shell.script(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "print('sum', total.item(), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    nodes = [shell.start("run", "--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-backend", "c10d", script) for _ in range(2)]
    assert [node.wait() for node in nodes] == [0, 0], [node.stderr for node in nodes]
    assert sorted(line for node in nodes for line in node.stdout.splitlines()) == ["[0]: sum 2.0", "[1]: sum 2.0"]


def test_a_failure_on_one_machine_starts_the_workers_of_all_anew(shell: Shell, endpoint: str) -> None:
    script = shell.script(
        PLACE + "import pathlib, sys, time\n"
        "mine, other = (pathlib.Path('started-' + rank) for rank in (os.environ['RANK'], '0'))\n"
        "if not mine.exists():\n"
        "    mine.touch()\n"
        "    while not other.exists(): time.sleep(0.01)\n"
        "    if os.environ['RANK'] == '1': sys.exit(1)\n"
        "    time.sleep(60)\n"
    )
    nodes = [shell.start("run", "--nnodes", "2", "--max-restarts", "1", "--rdzv-endpoint", endpoint, script) for _ in range(2)]
    assert [node.wait() for node in nodes] == [0, 0], [node.stderr for node in nodes]
    assert [len(places(node)) for node in nodes] == [2, 2]


def test_a_restart_for_which_the_others_are_no_longer_there_fails_at_once(shell: Shell, endpoint: str) -> None:
    script = shell.script(
        PLACE + "import pathlib, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    pathlib.Path('failed').touch()\n"
        "    sys.exit(1)\n"
        "while not pathlib.Path('failed').exists(): time.sleep(0.01)\n"
    )
    nodes = [shell.start("run", "--nnodes", "2", "--max-restarts", "1", "--rdzv-endpoint", endpoint, script) for _ in range(2)]
    # The one that succeeds may have been started again meanwhile, and fall with the other.
    assert sorted(node.wait() for node in nodes) in ([0, 1], [1, 1]), [node.stderr for node in nodes]


def test_a_machine_that_gives_up_ends_the_run_on_all(shell: Shell, endpoint: str) -> None:
    script = shell.script(PLACE + "import sys, time\nif os.environ['RANK'] == '1': sys.exit(5)\ntime.sleep(60)")
    nodes = [shell.start("run", "--nnodes", "2", "--rdzv-endpoint", endpoint, script) for _ in range(2)]
    assert sorted(node.wait() for node in nodes) == [1, 5], [node.stderr for node in nodes]
    assert any("was stopped: the workers on" in node.stderr for node in nodes)


def test_a_launcher_that_comes_later_enlarges_the_world_of_a_plain_script(shell: Shell, endpoint: str) -> None:
    script = shell.script(PLACE + "import pathlib, time\nwhile not pathlib.Path('done').exists(): time.sleep(0.01)\n")
    flags = ["run", "--nnodes", "1:2", "--rdzv-endpoint", endpoint, "--rdzv-conf", "last_call_timeout=0.1", script]
    first = shell.start(*flags)
    first.wait_for_output("0 1 0 0 1")
    second = shell.start(*flags)
    second.wait_for(lambda: len(places(second)) == 1, "the second launcher's worker")
    first.wait_for(lambda: len(places(first)) == 2, "the first launcher's second start")
    (shell.directory / "done").touch()
    assert [first.wait(), second.wait()] == [0, 0], [first.stderr, second.stderr]
    assert sorted([places(first)[1][:2], places(second)[0][:2]]) == [["0", "2"], ["1", "2"]]


def test_elastic_workers_stay_as_they_are_when_a_launcher_comes(shell: Shell, endpoint: str, elastic_worker: Path) -> None:
    finish = shell.directory / "finish"
    flags = ["run", "--nnodes", "1:2", "--rdzv-endpoint", endpoint, "--rdzv-conf", "last_call_timeout=0.1", elastic_worker, finish]
    first = shell.start(*flags)
    first.wait_for_output("generation 1 rank 0 of 1")
    second = shell.start(*flags)
    second.wait_for_output("generation 2 rank 1 of 2")
    first.wait_for_output("generation 2 rank 0 of 2")
    second.process.kill()
    first.wait_for_output("generation 3 rank 0 of 1")
    finish.touch()
    assert first.wait() == 0, first.stderr
    assert "anew" not in first.stderr


def test_places_may_be_settled_beforehand(shell: Shell, endpoint: str) -> None:
    script = shell.script(PLACE)
    flags = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", "1234", "--rdzv-endpoint", endpoint, script]
    nodes = [shell.start("run", "--node-rank", str(rank), *flags) for rank in (1, 0)]
    assert [node.wait() for node in nodes] == [0, 0], [node.stderr for node in nodes]
    assert [places(node) for node in nodes] == [[["1", "2", "0", "1", "2", "1234"]], [["0", "2", "0", "0", "2", "1234"]]]


def test_a_coordinator_that_is_not_there_is_told_with_the_remedy(shell: Shell) -> None:
    script = shell.script(PLACE)
    status, _, err = shell.run("run", "--rdzv-endpoint", "127.0.0.1:9", "--rdzv-conf", "join_timeout=1", script)
    assert status == 1
    assert "no coordinator has answered at 127.0.0.1:9 (--rdzv-endpoint) for 1 s; on one machine use --standalone" in err


def test_launchers_that_do_not_come_together_in_time_say_so(shell: Shell, endpoint: str) -> None:
    script = shell.script(PLACE)
    status, _, err = shell.run("run", "--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-conf", "join_timeout=2", script)
    assert status == 1
    assert "2 launchers for job default did not come together within 2 s" in err
