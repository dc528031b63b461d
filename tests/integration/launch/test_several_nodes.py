"""Launchers that share a coordinator, as on several machines; here all run on one."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.exit_status import PREEMPTED
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2 as pb

Shell = Any  # of tests/integration/conftest.py
Command = Any
Coordinator = Any  # of conftest.py here

PLACE = """
import os

print(
    *map(
        os.environ.get,
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT"),
    ),
    flush=True,
)
"""


def places(command: Command) -> list[list[str]]:
    return [line.split()[1:] for line in command.stdout.splitlines()]


def test_launchers_agree_on_the_ranks_of_their_workers(shell: Shell, endpoint: str) -> None:
    script = shell.script(PLACE)
    nodes = [
        shell.start(
            "run", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-endpoint", endpoint, script
        )
        for _ in range(2)
    ]
    assert [node.wait() for node in nodes] == [0, 0], [node.stderr for node in nodes]
    lines = [line for node in nodes for line in places(node)]
    assert sorted(line[:5] for line in lines) == [
        ["0", "4", "0", "0", "2"],
        ["1", "4", "1", "0", "2"],
        ["2", "4", "0", "1", "2"],
        ["3", "4", "1", "1", "2"],
    ]
    assert len({line[5] for line in lines}) == 1


def test_all_reduce_over_two_launchers_with_a_proxy_in_their_environment(
    shell: Shell, endpoint: str
) -> None:
    script = shell.script(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "print('sum', total.item(), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    flags = ("run", "--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-backend", "c10d")
    nodes = [
        shell.start(*flags, script, http_proxy="http://127.0.0.1:1", no_proxy="") for _ in range(2)
    ]
    assert [node.wait() for node in nodes] == [0, 0], [node.stderr for node in nodes]
    assert sorted(line for node in nodes for line in node.stdout.splitlines()) == [
        "[0]: sum 2.0",
        "[1]: sum 2.0",
    ]


def test_failure_on_one_machine_restarts_the_workers_of_all(shell: Shell, endpoint: str) -> None:
    script = shell.script(
        PLACE + "import pathlib, sys, time\n"
        "mine, other = (pathlib.Path('started-' + rank) for rank in (os.environ['RANK'], '0'))\n"
        "if not mine.exists():\n"
        "    mine.touch()\n"
        "    while not other.exists(): time.sleep(0.01)\n"
        "    if os.environ['RANK'] == '1': sys.exit(1)\n"
        "    time.sleep(60)\n"
    )
    nodes = [
        shell.start(
            "run", "--nnodes", "2", "--max-restarts", "1", "--rdzv-endpoint", endpoint, script
        )
        for _ in range(2)
    ]
    assert [node.wait() for node in nodes] == [0, 0], [node.stderr for node in nodes]
    assert [len(places(node)) for node in nodes] == [2, 2]


def test_restart_whose_other_launchers_have_left_fails_at_once(shell: Shell, endpoint: str) -> None:
    script = shell.script(
        PLACE + "import pathlib, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    pathlib.Path('failed').touch()\n"
        "    sys.exit(1)\n"
        "while not pathlib.Path('failed').exists(): time.sleep(0.01)\n"
    )
    nodes = [
        shell.start(
            "run", "--nnodes", "2", "--max-restarts", "1", "--rdzv-endpoint", endpoint, script
        )
        for _ in range(2)
    ]
    # The worker that succeeds may have been restarted meanwhile, and fails with the other.
    assert sorted(node.wait() for node in nodes) in ([0, 1], [1, 1]), [
        node.stderr for node in nodes
    ]


def test_a_machine_that_gives_up_ends_the_run_on_all(shell: Shell, endpoint: str) -> None:
    script = shell.script(
        PLACE + "import sys, time\nif os.environ['RANK'] == '1': sys.exit(5)\ntime.sleep(60)"
    )
    nodes = [
        shell.start("run", "--nnodes", "2", "--rdzv-endpoint", endpoint, script) for _ in range(2)
    ]
    assert sorted(node.wait() for node in nodes) == [1, 5], [node.stderr for node in nodes]
    assert any("was stopped: the workers on" in node.stderr for node in nodes)


def test_late_launcher_enlarges_the_world_of_a_plain_script(shell: Shell, endpoint: str) -> None:
    script = shell.script(
        PLACE + "import pathlib, time\nwhile not pathlib.Path('done').exists(): time.sleep(0.01)\n"
    )
    flags = [
        "run",
        "--nnodes",
        "1:2",
        "--rdzv-endpoint",
        endpoint,
        "--rdzv-conf",
        "last_call_timeout=0.1",
        script,
    ]
    first = shell.start(*flags)
    first.wait_for_output("0 1 0 0 1")
    second = shell.start(*flags)
    second.wait_for(lambda: len(places(second)) == 1, "the second launcher's worker")
    first.wait_for(lambda: len(places(first)) == 2, "the first launcher's second start")
    (shell.directory / "done").touch()
    assert [first.wait(), second.wait()] == [0, 0], [first.stderr, second.stderr]
    assert sorted([places(first)[1][:2], places(second)[0][:2]]) == [["0", "2"], ["1", "2"]]


def test_elastic_workers_keep_running_when_a_launcher_arrives(
    shell: Shell, endpoint: str, elastic_worker: Path
) -> None:
    finish = shell.directory / "finish"
    flags = [
        "run",
        "--nnodes",
        "1:2",
        "--rdzv-endpoint",
        endpoint,
        "--rdzv-conf",
        "last_call_timeout=0.1",
        elastic_worker,
        finish,
    ]
    first = shell.start(*flags)
    first.wait_for_output("generation 1 rank 0 of 1")
    second = shell.start(*flags)
    second.wait_for_output("generation 2 rank 1 of 2")
    first.wait_for_output("generation 2 rank 0 of 2")
    second.process.kill()
    first.wait_for_output("generation 3 rank 0 of 1")
    finish.touch()
    assert first.wait() == 0, first.stderr
    assert "restarting all workers" not in first.stderr


def test_places_may_be_fixed_in_advance(shell: Shell, endpoint: str) -> None:
    script = shell.script(PLACE)
    flags = [
        "--nnodes",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        "1234",
        "--rdzv-endpoint",
        endpoint,
        script,
    ]
    nodes = [shell.start("run", "--node-rank", str(rank), *flags) for rank in (1, 0)]
    assert [node.wait() for node in nodes] == [0, 0], [node.stderr for node in nodes]
    assert [places(node) for node in nodes] == [
        [["1", "2", "0", "1", "2", "1234"]],
        [["0", "2", "0", "0", "2", "1234"]],
    ]


def test_missing_coordinator_is_reported_with_the_remedy(shell: Shell) -> None:
    script = shell.script(PLACE)
    status, _, err = shell.run(
        "run", "--rdzv-endpoint", "127.0.0.1:9", "--rdzv-conf", "join_timeout=1", script
    )
    assert status == 1
    assert re.search(
        r"no coordinator responded at 127\.0\.0\.1:9 \(--rdzv-endpoint\) for \d+ s: nothing "
        r"listens at 127\.0\.0\.1:9 "
        r"\(connection refused\); on one machine, use --standalone",
        err,
    ), err


def test_launcher_that_waits_for_a_coordinator_names_the_reason_within_seconds(
    shell: Shell,
) -> None:
    script = shell.script(PLACE)
    command = shell.start(
        "run", "--rdzv-endpoint", "coordinator.invalid:9", "--rdzv-conf", "join_timeout=60", script
    )
    cause = (
        "longer for the coordinator at coordinator.invalid:9: the host name 'coordinator.invalid' "
        "cannot be resolved"
    )
    command.wait_for(lambda: cause in command.stderr, "the launcher to say why it waits")
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == PREEMPTED


def test_launchers_that_do_not_rendezvous_in_time_report_it(shell: Shell, endpoint: str) -> None:
    script = shell.script(PLACE)
    status, _, err = shell.run(
        "run", "--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-conf", "join_timeout=2", script
    )
    assert status == 1
    assert "2 launchers for run 1 of job default did not all join within 2 s" in err


ELASTIC_AND_CUT_OFF = """
import os, pathlib, time
pathlib.Path(os.environ["SHOAL_MEMBER_FILE"]).write_text("joined")
print("works", flush=True)
while not pathlib.Path("done").exists(): time.sleep(0.01)
pathlib.Path(os.environ["SHOAL_MEMBER_FILE"]).write_text("finished")
"""


def test_evicted_elastic_workers_are_not_restarted_when_launchers_arrive(
    shell: Shell, endpoint: str
) -> None:
    script = shell.script(ELASTIC_AND_CUT_OFF)
    flags = [
        "run",
        "--nnodes",
        "1:2",
        "--rdzv-endpoint",
        endpoint,
        "--rdzv-conf",
        "last_call_timeout=0.1",
        script,
    ]
    first = shell.start(*flags)
    first.wait_for_output("works")
    second = shell.start(*flags)
    second.wait_for_output("works")
    (shell.directory / "done").touch()
    assert [first.wait(), second.wait()] == [0, 0], [first.stderr, second.stderr]
    assert [node.stdout.count("works") for node in (first, second)] == [1, 1]
    assert "restarting all workers" not in first.stderr + second.stderr


@pytest.mark.slow
@pytest.mark.fresh
def test_workers_continue_when_the_coordinator_returns_without_its_data(
    shell: Shell, coordinator: Coordinator, endpoint: str
) -> None:
    script = shell.script(
        PLACE + "import pathlib, time\nwhile not pathlib.Path('done').exists(): time.sleep(0.01)\n"
    )
    nodes = [
        shell.start("run", "--nnodes", "2", "--rdzv-endpoint", endpoint, script) for _ in range(2)
    ]
    for node in nodes:
        node.wait_for(lambda node=node: len(places(node)) == 1, "its worker")
    coordinator.lose_data()
    nodes[0].wait_for(
        lambda: any(
            "lost its data, including job default; created the job again" in node.stderr
            for node in nodes
        ),
        "the word",
    )
    with CoordinatorClient(ChannelSettings(address=endpoint)) as client:
        nodes[0].wait_for(
            lambda: client.get_job("default.nodes").generation.number,
            "the launchers' next generation",
        )
    (shell.directory / "done").touch()
    assert [node.wait() for node in nodes] == [0, 0], [node.stderr for node in nodes]
    assert [len(places(node)) for node in nodes] == [1, 1]
    assert "restarting all workers" not in nodes[0].stderr + nodes[1].stderr


@pytest.mark.parametrize("settled", [False, True])
def test_a_worker_that_raises_ends_the_job_on_all_machines(
    shell: Shell, endpoint: str, elastic_worker: Path, settled: bool
) -> None:
    flags = [
        "--nnodes",
        "2" if settled else "1:2",
        "--rdzv-endpoint",
        endpoint,
        elastic_worker,
        shell.directory / "finish",
    ]
    first, second = (
        shell.start(
            "run",
            *(("--master-addr", "127.0.0.1", "--node-rank", str(rank)) if settled else ()),
            *flags,
        )
        for rank in range(2)
    )
    for node in (first, second):
        node.wait_for(lambda node=node: " of 2\n" in node.stdout, "both ranks")
    raising, other = (first, second) if "rank 1 of 2" in first.stdout else (second, first)
    (shell.directory / "raise-1").touch()
    assert [raising.wait(), other.wait()] == [1, 1], [first.stderr, second.stderr]
    assert re.search(
        r"rank 1 (\(output \[0\]\) )?on \S+ \(pid \d+\) ended with exit code 1", other.stderr
    ), other.stderr
    assert "left" in other.stdout


def test_all_launchers_of_a_preempted_allocation_report_it(
    shell: Shell, endpoint: str, elastic_worker: Path
) -> None:
    nodes = [
        shell.start("run", "--nnodes", "2", "--rdzv-endpoint", endpoint, elastic_worker, "never")
        for _ in range(2)
    ]
    for node in nodes:
        node.wait_for(lambda node=node: " of 2\n" in node.stdout, "both ranks")
    for node in nodes:
        node.process.send_signal(signal.SIGTERM)
    assert [node.wait() for node in nodes] == [PREEMPTED, PREEMPTED], [
        node.stderr for node in nodes
    ]
    assert all("left" in node.stdout for node in nodes)


@pytest.mark.parametrize(
    "least", [[], ["--min-workers", "2"]], ids=["fixed", "as many as at the start"]
)
def test_killed_worker_of_a_fixed_run_stops_the_others_only_if_too_few_are_left(
    shell: Shell, endpoint: str, elastic_worker: Path, least: list[str]
) -> None:
    finish = shell.directory / "finish"
    flags = [
        "run",
        "--nnodes",
        "2",
        *least,
        "--max-restarts",
        "0",
        "--rdzv-endpoint",
        endpoint,
        elastic_worker,
        finish,
    ]
    first, second = (shell.start(*flags) for _ in range(2))
    for node in (first, second):
        node.wait_for(lambda node=node: " of 2\n" in node.stdout, "both ranks")
    with CoordinatorClient(ChannelSettings(address=endpoint)) as client:
        killed, kept = (member.pid for member in client.get_job("default").members)
        os.kill(killed, signal.SIGKILL)
        if least:
            first.wait_for(
                lambda: client.get_job("default").phase == pb.JOB_PHASE_WAITING, "the job to wait"
            )
            os.kill(kept, signal.SIGKILL)
            assert {first.wait(), second.wait()} == {128 + signal.SIGKILL}
            return
        first.wait_for(
            lambda: " rank 0 of 1\n" in first.stdout + second.stdout,
            "the one that is left to go on alone",
        )
    finish.touch()
    assert {first.wait(), second.wait()} == {0, 128 + signal.SIGKILL}, [first.stderr, second.stderr]


def test_survivors_that_wait_for_more_workers_still_hold_the_training_state(
    shell: Shell, endpoint: str, elastic_worker: Path
) -> None:
    finish = shell.directory / "finish"
    flags = [
        "run",
        "--nnodes",
        "2",
        "--min-workers",
        "2",
        "--rdzv-endpoint",
        endpoint,
        elastic_worker,
        finish,
    ]
    first, second = (shell.start(*flags) for _ in range(2))
    for node in (first, second):
        node.wait_for(lambda node=node: " of 2\n" in node.stdout, "both ranks")
    with CoordinatorClient(ChannelSettings(address=endpoint)) as client:
        first.wait_for(
            lambda: all(member.progress.step for member in client.get_job("default").members),
            "a step",
        )
        os.kill(client.get_job("default").members[0].pid, signal.SIGKILL)
    first.wait_for(
        lambda: (
            "replaced by pid" in first.stderr + second.stderr
            or "NO WORKER" in first.stderr + second.stderr
        ),
        "the word",
    )
    for node in (first, second):
        node.wait_for(
            lambda node=node: re.search(r"generation [2-9] rank . of 2", node.stdout),
            "both ranks again",
        )
    finish.touch()
    assert [first.wait(), second.wait()] == [0, 0], [first.stderr, second.stderr]
    assert "NO WORKER THAT HOLDS THE TRAINING STATE" not in first.stderr + second.stderr
