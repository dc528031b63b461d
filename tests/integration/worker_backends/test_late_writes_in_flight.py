"""The rounds of docs/benchmarks/late-writes.md: no collective left by a Shoal group writes into
tensors in use, and no rank waits for a timeout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.sessions import blocks_of

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/benchmarks/late-writes.md"
_TIMEOUT_S = 60
_DEADLINE_S = 300

needs_api = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"),
    reason=f"torch has _reconfigure from 2.14 on, and {torch.__version__} is installed",
)


def rounds(scheme: str, directory: Path) -> list[dict[str, Any]]:
    """Runs two rounds, with one and with two all-reduces in flight."""
    output = directory / "rounds.json"
    flags = {"scheme": scheme, "rounds": 2, "numel": 1 << 20, "timeout-s": _TIMEOUT_S}
    subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.workers.late_writes",
            *(f"--{name}={value}" for name, value in flags.items()),
            f"--output={output}",
        ],
        cwd=ROOT,
        timeout=_DEADLINE_S,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(output.read_text())
    assert [one["in_flight"] for one in found] == [1, 2]
    return found


def check_that_nothing_was_late(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["changed"] == 0
        assert one["failures"] == []
        assert one["next_s"] < _TIMEOUT_S / 2


def test_shoal_groups_formed_again_by_hand_write_nothing_late(tmp_path: Path) -> None:
    check_that_nothing_was_late(rounds("shoal", tmp_path))


@needs_api
def test_reconfigured_shoal_groups_write_nothing_late(tmp_path: Path) -> None:
    check_that_nothing_was_late(rounds("shoal-reconfigure", tmp_path))


def test_rounds_find_late_writes_of_torchs_groups(tmp_path: Path) -> None:
    assert all(one["changed"] and one["silent"] for one in rounds("gloo", tmp_path))


@needs_api
def test_script_of_the_page_shows_late_writes(tmp_path: Path) -> None:
    (script,) = (block for block in blocks_of(PAGE) if "late_write.py" in block.title)
    (tmp_path / "late_write.py").write_text(script.text)
    ran = subprocess.run(
        [sys.executable, "late_write.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=True,
    )
    shown = "4000000 of 4000000 elements changed"
    assert sorted(ran.stdout.splitlines()) == [f"rank 0: {shown}", f"rank 1: {shown}"]
