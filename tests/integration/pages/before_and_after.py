"""Pages that show a script before and after its conversion: the differences, the script before, and
a comparison of two runs of the script after."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import shoal
import torch

from tests.sessions import blocks_of

ROOT = Path(__file__).parents[3]


def _changes(lines: list[str]) -> list[str]:
    """Returns the removed and added lines of a diff, without its header."""
    return [
        line for line in lines if line[:1] in ("+", "-") and not line.startswith(("+++", "---"))
    ]


def assert_shows_every_difference(page: Path, scripts: Path) -> None:
    """Checks that the diffs of a page, together, are the differences between `train_plain.py` and
    `train.py` in `scripts`, in order. Empty lines do not count."""
    before, after = (
        (scripts / name).read_text().splitlines() for name in ("train_plain.py", "train.py")
    )
    shown = [block.text.splitlines() for block in blocks_of(page) if block.kind == "diff"]
    found = _changes([line for block in shown for line in block])
    expected = _changes(list(difflib.unified_diff(before, after, n=0, lineterm="")))
    for sign in "+-":
        assert [line for line in found if line[0] == sign and line[1:]] == [
            line for line in expected if line[0] == sign and line[1:]
        ]


def printed_by(directory: Path, script: str, *arguments: str, **settings: str) -> list[str]:
    """Runs a script of `directory` in one process without Shoal. Returns the lines of its
    output."""
    ended = subprocess.run(
        [sys.executable, script, *arguments],
        check=True,
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
        capture_output=True,
        text=True,
    )
    return ended.stdout.splitlines()


def newest_states(
    directory: Path, average: int | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the newest models in `directory / "undisturbed"` and `directory / "checkpoints"`, or
    the averages of them with this number."""
    undisturbed, disturbed = (
        shoal.load_full_state(directory / name, average=average)
        for name in ("undisturbed", "checkpoints")
    )
    assert undisturbed.keys() == disturbed.keys()
    return undisturbed, disturbed
