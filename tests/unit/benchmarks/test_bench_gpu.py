"""`make bench-gpu` as far as it needs no CUDA: counts in a trace, training steps on the host, and
groups on a fake device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import checkpoint, coordinator, groups, large, pair, recovery
from benchmarks.gpu.__main__ import PARTS, main
from benchmarks.gpu.context import Context
from benchmarks.gpu.decoder import LARGE, Decoder
from benchmarks.gpu.steps import Way, take
from benchmarks.gpu.traces import count, counted
from benchmarks.report import Row, Table
from benchmarks.workers.phases import CONNECTED, CONNECTING, ENDED, RESTED, Moment, parts_of
from tests.fake_device.library import FakeCuda
from tests.fake_device.machine import Machine


def _event(category: str, name: str, at: float = 1.0, lasts: float = 1.0) -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": at, "dur": lasts}


def test_launches_waits_and_copies_are_counted_by_their_cuda_names() -> None:
    counts = count(
        [
            _event("user_annotation", "shoal-steps", 0.0, 10.0),
            _event("cpu_op", "aten::add"),
            _event("cuda_runtime", "cudaLaunchKernel"),
            _event("cuda_runtime", "cudaLaunchKernelExC"),
            _event("cuda_driver", "cuLaunchKernelEx"),
            _event("cuda_runtime", "cudaStreamSynchronize"),
            _event("cuda_runtime", "cudaEventSynchronize"),
            _event("cuda_runtime", "cudaEventQuery"),  # queries without waiting
            _event("cuda_runtime", "cudaMemcpyAsync"),
            # a call by the profiler itself
            _event("cuda_runtime", "cudaDeviceSynchronize", at=11.0),
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
def test_steps_are_taken_in_every_configuration(way: Way) -> None:
    taken = take(way, device=torch.device("cpu"), width=32, steps=2)
    assert len(taken.seconds) == 2
    assert taken.counts.operators > 100


def test_groups_of_one_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    ones = groups.come_and_go(lambda: FakeCuda(machine, 0), groups=1)
    # the benchmark sets it for subgroups; the test restores it
    monkeypatch.setenv("SHOAL_NCCL_SPLIT", "0")
    parts = groups.come_and_go(lambda: FakeCuda(machine, 0), groups=1, split=True, finalize=True)
    assert len(parts.connect_s) == len(ones.connect_s)
    assert max(stream.splits for stream in machine.streams) == len(parts.connect_s)
    assert len(ones.connect_s) == len(ones.leave_s) == 3
    many = groups.collectives(lambda: FakeCuda(machine, 0))
    assert many.started_s <= many.ordered_s
    assert not machine.busy(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_missing_device_is_reported_and_nothing_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--output", str(tmp_path / "figures")]) == 0
    assert "skipped: torch sees no CUDA device here" in capsys.readouterr().out
    assert not (tmp_path / "figures").exists()


@pytest.mark.slow
def test_a_rehearsal_on_the_host_writes_the_table_of_steps(tmp_path: Path) -> None:
    assert (
        main(
            ["steps", "--device", "cpu", "--width", "32", "--steps", "2", "--output", str(tmp_path)]
        )
        == 0
    )
    table = json.loads((tmp_path / "gpu-steps.json").read_text())
    assert {row["name"].partition(":")[0] for row in table["rows"]} == {
        "torch",
        "ddp",
        "zero1",
        "zero2",
        "zero3",
    }
    assert not [row["failure"] for row in table["rows"] if row["failure"]]


# --- rehearsals of the parts


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(device=torch.device("cpu"), what="the host", rows=tmp_path / "rows.jsonl")


def failures(table: Table) -> list[str]:
    return [f"{row.name}: {row.failure}" for row in table.rows if row.failure]


def test_every_recipe_trains_the_same_model_on_the_same_samples(context: Context) -> None:
    table = large.measure(context)
    assert failures(table) == []
    losses = {row.name: float(row.cells["loss"]) for row in table.rows}
    assert len(losses) == len(large.RECIPES)
    # with the precision of bf16
    assert losses == {name: pytest.approx(losses["torch"], abs=0.02) for name in losses}


def test_the_large_model_has_1_3_billion_parameters() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in Decoder(LARGE).parameters()) == pytest.approx(
            1.34e9, rel=0.01
        )


def test_measured_row_is_saved_at_once_and_a_failure_costs_the_others_nothing(
    context: Context,
) -> None:
    def fail() -> Row:
        raise RuntimeError("out of memory\nwith details")

    row = context.measured("large", "first", fail)
    assert row.failure == "RuntimeError: out of memory\nwith details"
    context.measured("large", "second", lambda: Row(name="second", command="", cells={"ms": "1"}))
    assert context.rows is not None
    written = [json.loads(line) for line in context.rows.read_text().splitlines()]
    assert [(each["part"], each["name"]) for each in written] == [
        ("large", "first"),
        ("large", "second"),
    ]


@pytest.mark.slow
def test_a_pair_of_ranks_checks_every_collective_and_loses_its_peer(context: Context) -> None:
    table = pair.measure(context)
    assert failures(table) == []
    names = [row.name for row in table.rows]
    assert "non-blocking: all_to_all, equal parts" in names
    assert names[-1] == "blocking: abort of an all-reduce whose peer is killed"
    results = {row.name.partition(": ")[2]: row.cells["result"] for row in table.rows}
    assert [
        results[name] for name in ("all_reduce", "reduce_scatter", "send and recv", "scatter")
    ] == ["right"] * 4


def test_checkpoint_of_the_model_is_saved_during_training(context: Context) -> None:
    table = checkpoint.measure(context)
    assert failures(table) == []
    assert float(table.rows[0].cells["written after s"]) > 0


@pytest.mark.slow
def test_steps_are_taken_without_and_with_a_coordinator(context: Context) -> None:
    table = coordinator.measure(context)
    assert failures(table) == []
    assert [set(row.cells) for row in table.rows] == [{"step ms", "step alone ms", "host ms"}] * 2


@pytest.mark.slow
def test_the_parts_of_a_recovery_add_up_to_its_pause(context: Context) -> None:
    table = recovery.measure(context)
    assert failures(table) == []
    for row in table.rows:
        parts = [
            float(row.cells[f"{part} s"])
            for part in ("notice", "abort", "agree", "connect", "redo")
        ]
        assert sum(parts) == pytest.approx(float(row.cells["pause s"]), abs=0.01)


def test_parts_of_a_recovery_are_separated_by_the_timestamps_of_a_worker() -> None:
    moments = [
        Moment(time_ns=50, name=CONNECTED),  # the group that is lost
        Moment(time_ns=300, name=ENDED),
        Moment(time_ns=400, name=RESTED),
        Moment(time_ns=900, name=CONNECTING),
        Moment(time_ns=950, name=ENDED),  # a failed attempt
        Moment(time_ns=1000, name=CONNECTING),
        Moment(time_ns=1500, name=CONNECTED),
        Moment(time_ns=9000, name=ENDED),  # a later death
    ]
    parts = parts_of(moments, killed_ns=100, committed_ns=2100)
    assert {part: round(seconds * 1e9) for part, seconds in parts.items()} == {
        "notice": 200,
        "abort": 100,
        "agree": 500,
        "connect": 600,
        "redo": 600,
    }


def test_parts_add_up_if_a_timestamp_is_missing() -> None:
    moments = [Moment(time_ns=900, name=CONNECTING), Moment(time_ns=1500, name=CONNECTED)]
    parts = parts_of(moments, killed_ns=100, committed_ns=2100)
    assert round(sum(parts.values()) * 1e9) == 2000
    assert round(parts["connect"] * 1e9) == 600


def test_unknown_part_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["larch"])
    assert f"no part named larch; there are {', '.join(PARTS)}" in capsys.readouterr().err


def test_rehearsal_omits_measurements_that_need_a_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["copies", "--device", "cpu", "--output", str(tmp_path)]) == 0
    assert "left out: copies is measured on a device alone" in capsys.readouterr().out
