"""The benchmarks' command line and their reports."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shoal_worker.backends.gloo.sockets import GRACE_S

from benchmarks import kill_recovery, step_time
from benchmarks.devices import CUDA, HOST, Devices
from benchmarks.registry import BENCHMARKS
from benchmarks.report import Machine, Row, Table, markdown, write
from benchmarks.workers.workload import Workload, parser, workload_of

REPOSITORY = Path(__file__).parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)


def test_list_names_every_table() -> None:
    answer = run("--list")
    assert answer.returncode == 0, answer.stderr
    assert [line.split()[0] for line in answer.stdout.splitlines()] == [benchmark.key for benchmark in BENCHMARKS]


def test_a_table_that_is_not_there_is_refused_with_those_that_are() -> None:
    answer = run("t99")
    assert answer.returncode == 2
    assert f"no table named t99; there are {', '.join(benchmark.key for benchmark in BENCHMARKS)}" in answer.stderr


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.key)
def test_every_table_has_a_module_that_measures_it(benchmark: object) -> None:
    assert callable(importlib.import_module(benchmark.module).measure)  # type: ignore[attr-defined]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_tables_of_devices_are_refused_in_one_line_where_there_are_too_few() -> None:
    answer = run("--device", "cuda", "t1")
    assert answer.returncode == 2
    (line,) = answer.stderr.splitlines()
    assert "--device cuda: t1 needs 3 CUDA devices, one for each worker, and torch sees 0 here" in line
    assert "run it on a machine with as many" in line


def test_a_table_of_the_host_is_refused_on_devices_with_those_that_are_not() -> None:
    answer = run("--device", "cuda-rehearsal", "t2", "t4")
    assert answer.returncode == 2
    (line,) = answer.stderr.splitlines()
    assert "t4 is measured on the host alone; expected some of t1, t2, t3, t6, t7" in line


def test_rows_of_devices_name_them_and_rows_of_the_host_do_not() -> None:
    rows = [Row(name="shoal, 2 ranks", command="", cells={})]
    assert [row.name for row in HOST.named(rows)] == ["shoal, 2 ranks"]
    devices = Devices(kind=CUDA, names=("NVIDIA H100",) * 2)
    assert [row.name for row in devices.named(rows)] == ["shoal, 2 ranks, on NVIDIA H100"]
    assert devices.lacking("it", 2) is None
    assert "it needs 3 CUDA devices" in str(devices.lacking("it", 3))
    assert HOST.lacking("it", 100) is None


def test_each_system_on_devices_is_told_so_and_the_host_is_what_it_is_without(tmp_path: Path) -> None:
    words = Workload(log=tmp_path, ranks=2, width=4, batch=8, device="cuda").arguments()
    assert workload_of(parser().parse_args(words)).device == "cuda"
    assert workload_of(parser().parse_args([word for word in words if not word.startswith("--device")])).device == "cpu"


def test_on_devices_shoal_and_torchs_own_take_part(tmp_path: Path) -> None:
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
    assert {candidate.of_floor for candidate in kill_recovery.CUDA_CANDIDATES} == {kill_recovery.CUDA_OF_FLOOR, None}
    assert kill_recovery.NOTICED_S == GRACE_S


def test_a_report_holds_every_sample_and_why_a_row_is_empty(tmp_path: Path) -> None:
    table = Table(
        key="t0",
        title="An example",
        target="<= 1",
        method="By hand.",
        columns=("s",),
        rows=(
            Row(name="ours", command="shoal run", cells={"s": "0.5"}, samples={"s": [0.4, 0.6]}),
            Row(name="theirs", command="peer", cells={}, failure="peer is not installed\ndetails"),
        ),
        verdict="Measured: 0.5 s (reached).",
    )
    machine = Machine.here()
    write(tmp_path, table, machine, "python -m benchmarks t0")
    content = json.loads((tmp_path / "t0.json").read_text())
    assert content["rows"][0]["samples"] == {"s": [0.4, 0.6]}
    assert content["machine"]["cores"] == machine.cores
    page = (tmp_path / "t0.md").read_text()
    assert page == markdown(table, machine, "python -m benchmarks t0")
    assert "| ours | 0.5 |\n| theirs | - |" in page
    assert "- theirs failed: peer is not installed\n" in page
