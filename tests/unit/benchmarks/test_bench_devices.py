"""The tables of CUDA devices, as far as they need no device: refused combinations, participating
systems, synchronization, and the floor on the host."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from shoal_worker.backends.gloo.sockets import GRACE_S

from benchmarks import kill_recovery, step_time
from benchmarks.devices import CUDA, HOST, SHARED, Devices
from benchmarks.gates import Gate
from benchmarks.processes import Stage
from benchmarks.report import Row
from benchmarks.systems import start_bare
from benchmarks.workers.steplog import WARM_UP_STEPS, StepLog
from benchmarks.workers.workload import Workload, parser, workload_of

REPOSITORY = Path(__file__).parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_device_tables_are_refused_in_one_line_on_too_few_devices() -> None:
    answer = run("--device", "cuda", "t1")
    assert answer.returncode == 2
    (line,) = answer.stderr.splitlines()
    assert (
        "--device cuda: t1 needs 3 CUDA devices, one for each worker, and torch sees 0 here" in line
    )
    assert "run it on a machine with as many" in line


def test_host_table_is_refused_on_devices_with_a_list_of_device_tables() -> None:
    answer = run("--device", "cuda-rehearsal", "t2", "t4")
    assert answer.returncode == 2
    (line,) = answer.stderr.splitlines()
    assert "t4 is measured on the host alone; expected some of t1, t2, t3, t6, t7" in line


def test_rows_name_their_devices_unless_they_ran_on_the_host() -> None:
    rows = [Row(name="shoal, 2 ranks", command="", cells={})]
    assert [row.name for row in HOST.named(rows)] == ["shoal, 2 ranks"]
    devices = Devices(kind=CUDA, names=("NVIDIA H100",) * 2)
    assert [row.name for row in devices.named(rows)] == ["shoal, 2 ranks, on NVIDIA H100"]
    assert devices.lacking("it", 2) is None
    assert "it needs 3 CUDA devices" in str(devices.lacking("it", 3))
    assert HOST.lacking("it", 100) is None


def test_systems_on_devices_are_labelled_and_those_on_the_host_are_unchanged(
    tmp_path: Path,
) -> None:
    words = Workload(log=tmp_path, ranks=2, width=4, batch=8, device="cuda").arguments()
    assert workload_of(parser().parse_args(words)).device == "cuda"
    assert (
        workload_of(
            parser().parse_args([word for word in words if not word.startswith("--device")])
        ).device
        == "cpu"
    )


def test_shoal_and_torchs_own_systems_run_on_devices(tmp_path: Path) -> None:
    devices = Devices(kind=CUDA, names=("NVIDIA H100",) * 8)
    assert [side.name for side in step_time.sides_of(2, devices)] == [
        "torch DDP",
        "shoal",
        "shoal checking never",
        "shoal checking each step",
    ]
    assert [candidate.name for candidate in kill_recovery.CUDA_CANDIDATES] == [
        "shoal",
        "shoal, zero2",
        "shoal, fsdp",
        "shoal, 8 ranks",
        "torchrun, restart of all",
    ]
    assert {candidate.of_floor for candidate in kill_recovery.CUDA_CANDIDATES} == {
        kill_recovery.CUDA_OF_FLOOR,
        None,
    }
    assert kill_recovery.NOTICED_S == GRACE_S


def test_workers_that_share_a_gpu_are_reported_and_have_sizes_for_the_loopback_interface() -> None:
    devices = Devices(kind=SHARED, names=("one NVIDIA H100 that the workers share",) * 8)
    assert devices.for_cuda
    assert devices.flag == "cuda-shared"
    assert devices.size(host=400, device=4096) == 400
    assert devices.lacking("it", 8) is None
    words = Workload(log=Path("logs"), ranks=2, width=4, batch=8, device=devices.flag).arguments()
    assert workload_of(parser().parse_args(words)).device == "cuda-shared"


@pytest.mark.slow
def test_processes_that_share_a_gpu_are_separate_machines_to_nccl_and_devices_to_shoal() -> None:
    """Processes that share a GPU look like separate machines to NCCL and like separate devices to
    Shoal. The test checks the values that these compare, so it needs no GPU."""
    program = (
        "import os, types; from unittest import mock; from benchmarks.workers.shared_gpu import "
        "pass_for_a_machine\n"
        "pass_for_a_machine()\n"
        "from shoal_worker.backends.nccl.device import CudaDevice\n"
        "with mock.patch('torch.cuda.get_device_properties', "
        "return_value=types.SimpleNamespace(uuid='GPU-1')):\n"
        "    identity = CudaDevice.identity(types.SimpleNamespace(device=0))\n"
        "print(os.environ['NCCL_HOSTID'], os.environ['NCCL_SOCKET_IFNAME'], identity, sep=chr(10))"
    )

    def identities() -> list[str]:
        command = [sys.executable, "-c", program]
        answer = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True
        )
        return answer.stdout.splitlines()

    (first_host, interface, first), (second_host, _, second) = identities(), identities()
    assert interface == "lo"
    assert first_host != second_host
    assert first != second
    assert first.startswith("GPU-1 of ")


def test_single_commits_are_logged_after_the_device_has_finished_earlier_work(
    tmp_path: Path,
) -> None:
    seen: list[int] = []

    def settle() -> None:
        seen.append(
            len("".join(file.read_text() for file in tmp_path.glob("*.steps")).splitlines())
        )

    log = StepLog(tmp_path, steps=3, gate=None, settle=settle)
    for step in range(3):
        log.committed(group=1, world_size=1, rank=0, step=step)
    assert seen == [0, 1, 2]
    assert log.done


def test_block_is_timed_while_the_device_is_idle_at_both_ends_without_pauses_within(
    tmp_path: Path,
) -> None:
    steps, settled = [0], []
    path = tmp_path / "gate"
    with Gate(path, ranks=1, timeout_s=30) as gate:

        def train() -> None:
            log = StepLog(tmp_path, steps=0, gate=path, settle=lambda: settled.append(steps[0]))
            while not log.done:
                steps[0] += 1
                log.committed(group=1, world_size=1, rank=0, step=steps[0])
            log._gate._lines.close()  # stands in for the end of a worker's process
            log._gate._socket.close()

        worker = threading.Thread(target=train)
        worker.start()
        while not gate.complete():
            pass
        for _ in range(2):
            assert len(gate.block(10)[0]) == 10
        gate.dismiss()
        worker.join()
    block = WARM_UP_STEPS + 10
    assert settled == [1, 1 + WARM_UP_STEPS, 1 + block, 1 + block + WARM_UP_STEPS, 1 + 2 * block]


@pytest.mark.slow
def test_bare_connect_is_timed_on_the_host_as_on_devices(tmp_path: Path) -> None:
    words = [
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "benchmarks.workers.bare_connect",
        "--device",
        "cpu",
        "--times",
        "2",
    ]
    with Stage() as stage:
        output = stage.directory / "seconds.json"
        stage.finish(start_bare(stage, [*words, "--output", str(output)]).process, timeout_s=120)
        seconds = json.loads(output.read_text())
    assert len(seconds) == 2
    assert all(0 < each < 60 for each in seconds)
