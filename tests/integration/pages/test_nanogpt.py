"""docs/migration/nanogpt.md: its scripts, its differences, its commands, and their output."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import shoal
import torch

from tests.sessions import Session, blocks_of

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "migration" / "nanogpt.md"
SCRIPTS = ROOT / "examples" / "nanogpt"


def changes(lines: list[str]) -> list[str]:
    """Returns the removed and added lines of a diff, without its header."""
    return [
        line for line in lines if line[:1] in ("+", "-") and not line.startswith(("+++", "---"))
    ]


def test_page_shows_every_difference_between_the_scripts() -> None:
    before, after = (
        (SCRIPTS / name).read_text().splitlines() for name in ("train_plain.py", "train.py")
    )
    shown = [block.text.splitlines() for block in blocks_of(PAGE) if block.kind == "diff"]
    found = changes([line for block in shown for line in block])
    expected = changes(list(difflib.unified_diff(before, after, n=0, lineterm="")))
    for sign in "+-":
        assert [line for line in found if line[0] == sign and line[1:]] == [
            line for line in expected if line[0] == sign and line[1:]
        ]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_script_before_the_changes_trains_and_resumes(tmp_path: Path) -> None:
    shutil.copytree(SCRIPTS, tmp_path, dirs_exist_ok=True)
    script = tmp_path / "train_plain.py"
    text = script.read_text()
    assert text.count("= 500, 100, 10, 20") == 1
    script.write_text(text.replace("= 500, 100, 10, 20", "= 40, 20, 2, 10"))

    def run(script: str, **settings: str) -> list[str]:
        ended = subprocess.run(
            [sys.executable, script],
            check=True,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
            capture_output=True,
            text=True,
        )
        return ended.stdout.splitlines()

    run("prepare.py")
    printed = run("train_plain.py")
    first, last = (float(line.rsplit(" ", 1)[1]) for line in (printed[0], printed[-1]))
    assert printed[-1].startswith("iter 40: val loss ")
    assert last < first
    assert run("train_plain.py", INIT_FROM="resume") == [], "iteration 40 was the best and the last"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_worker_changes_no_parameter_of_the_script_after_the_changes(
    session: Session,
) -> None:
    shutil.copytree(SCRIPTS, session.directory, dirs_exist_ok=True)
    session.follow(blocks_of(PAGE))
    assert any("ended with SIGKILL" in said for _, said in session.printed)
    undisturbed, disturbed = (
        shoal.load_full_state(session.directory / name) for name in ("undisturbed", "checkpoints")
    )
    assert undisturbed.keys() == disturbed.keys()
    assert all(torch.equal(undisturbed[name], disturbed[name]) for name in undisturbed)
    best = shoal.load_full_state(session.directory / "checkpoints", best=True)
    assert best.keys() == disturbed.keys()
