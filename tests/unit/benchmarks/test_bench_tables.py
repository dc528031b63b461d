"""The benchmarks' command line and their reports."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.registry import BENCHMARKS
from benchmarks.report import Machine, Row, Table, markdown, write

REPOSITORY = Path(__file__).parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )


def test_list_names_every_table() -> None:
    answer = run("--list")
    assert answer.returncode == 0, answer.stderr
    assert [line.split()[0] for line in answer.stdout.splitlines()] == [
        benchmark.key for benchmark in BENCHMARKS
    ]


def test_unknown_table_is_refused_with_the_known_ones() -> None:
    answer = run("t99")
    assert answer.returncode == 2
    assert (
        f"no table named t99; there are {', '.join(benchmark.key for benchmark in BENCHMARKS)}"
        in answer.stderr
    )


def test_every_table_has_a_module_that_measures_it(subtests: pytest.Subtests) -> None:
    for benchmark in BENCHMARKS:
        with subtests.test(benchmark.key):
            assert callable(importlib.import_module(benchmark.module).measure)


def test_report_has_every_sample_and_the_reason_for_each_empty_row(tmp_path: Path) -> None:
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
