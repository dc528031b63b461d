"""`make bench-gpu` as far as it needs no CUDA: what it counts in a trace, its steps on the host, its groups on a device without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import groups
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.steps import Way, take
from benchmarks.gpu.traces import count, counted
from tests.fake_device.library import FakeCuda
from tests.fake_device.machine import Machine


def _event(category: str, name: str, at: float = 1.0, lasts: float = 1.0) -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": at, "dur": lasts}


def test_launches_waits_and_copies_are_counted_by_the_names_that_cuda_gives_them() -> None:
    counts = count(
        [
            _event("user_annotation", "shoal-steps", 0.0, 10.0),
            _event("cpu_op", "aten::add"),
            _event("cuda_runtime", "cudaLaunchKernel"),
            _event("cuda_runtime", "cudaLaunchKernelExC"),
            _event("cuda_driver", "cuLaunchKernelEx"),
            _event("cuda_runtime", "cudaStreamSynchronize"),
            _event("cuda_runtime", "cudaEventSynchronize"),
            _event("cuda_runtime", "cudaEventQuery"),  # asks, and does not wait
            _event("cuda_runtime", "cudaMemcpyAsync"),
            _event("cuda_runtime", "cudaDeviceSynchronize", at=11.0),  # the profiler's own
            _event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", at=12.0),
            _event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)"),
            _event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)"),
            _event("gpu_memcpy", "Memcpy DtoD (Device -> Device)"),
            _event("kernel", "void at::native::vectorized_elementwise_kernel"),
            {"ph": "M", "name": "process_name"},
        ],
        steps=2,
    )
    assert (counts.operators, counts.launches, counts.waits) == (0.5, 1.5, 1.0)
    assert counts.to_host == {"Pinned": 0.5, "Pageable": 0.5}
    assert counts.to_device == {"Pageable": 0.5}


def test_operators_are_counted_in_a_trace_of_torchs_profiler() -> None:
    tensor = torch.ones(3)
    counts = counted(tensor.neg_, steps=4)
    assert counts.operators == 1.0
    assert (counts.launches, counts.waits) == (0.0, 0.0)


@pytest.mark.parametrize(
    "way",
    [
        Way(name="torch"),
        Way(name="ddp", strategy="ddp", autocast=torch.bfloat16),
        Way(name="zero3", strategy="zero3"),
        Way(name="scaled", strategy="ddp", autocast=torch.bfloat16, scaled=True),
    ],
    ids=lambda way: way.name,
)
def test_steps_are_taken_in_every_way(way: Way) -> None:
    taken = take(way, device=torch.device("cpu"), width=32, steps=2)
    assert len(taken.seconds) == 2
    assert taken.counts.operators > 100


def test_groups_of_one_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    ones = groups.come_and_go(lambda: FakeCuda(machine, 0), groups=1)
    monkeypatch.setenv("SHOAL_NCCL_SPLIT", "0")  # which it sets for parts, and the test undoes
    parts = groups.come_and_go(lambda: FakeCuda(machine, 0), groups=1, split=True, finalize=True)
    assert len(parts.connect_s) == len(ones.connect_s)
    assert max(stream.splits for stream in machine.streams) == len(parts.connect_s)
    assert len(ones.connect_s) == len(ones.leave_s) == 3
    many = groups.collectives(lambda: FakeCuda(machine, 0))
    assert many.started_s <= many.ordered_s
    assert not machine.busy(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device_it_says_so_and_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path / "figures")]) == 0
    assert "skipped: torch sees no CUDA device here" in capsys.readouterr().out
    assert not (tmp_path / "figures").exists()


@pytest.mark.slow
def test_a_rehearsal_on_the_host_writes_the_table_of_steps(tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--width", "32", "--steps", "2", "--output", str(tmp_path)]) == 0
    table = json.loads((tmp_path / "gpu-steps.json").read_text())
    assert {row["name"].partition(":")[0] for row in table["rows"]} == {"torch", "ddp", "zero1", "zero2", "zero3"}
    assert not [row["failure"] for row in table["rows"] if row["failure"]]
