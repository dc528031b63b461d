"""docs/migration/nanogpt.md: its scripts, its differences, its commands, and their output."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import shoal

from tests.integration.pages.before_and_after import (
    ROOT,
    assert_shows_every_difference,
    printed_by,
)
from tests.sessions import Session, blocks_of

PAGE = ROOT / "docs" / "migration" / "nanogpt.md"
SCRIPTS = ROOT / "examples" / "nanogpt"


def test_page_shows_every_difference_between_the_scripts() -> None:
    assert_shows_every_difference(PAGE, SCRIPTS)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_script_before_the_changes_trains_and_resumes(tmp_path: Path) -> None:
    shutil.copytree(SCRIPTS, tmp_path, dirs_exist_ok=True)
    script = tmp_path / "train_plain.py"
    text = script.read_text()
    assert text.count("= 500, 100, 10, 20") == 1
    script.write_text(text.replace("= 500, 100, 10, 20", "= 40, 20, 2, 10"))
    printed_by(tmp_path, "prepare.py")
    printed = printed_by(tmp_path, "train_plain.py")
    first, last = (float(line.rsplit(" ", 1)[1]) for line in (printed[0], printed[-1]))
    assert printed[-1].startswith("iter 40: val loss ")
    assert last < first
    resumed = printed_by(tmp_path, "train_plain.py", INIT_FROM="resume")
    assert resumed == [], "iteration 40 was the best and the last"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_worker_changes_no_parameter_of_the_script_after_the_changes(
    session: Session,
) -> None:
    shutil.copytree(SCRIPTS, session.directory, dirs_exist_ok=True)
    session.follow(blocks_of(PAGE))
    assert any("ended with SIGKILL" in said for _, said in session.printed)
    assert any("bit for bit" in said for _, said in session.printed)
    best = shoal.load_full_state(session.directory / "checkpoints", best=True)
    assert best.keys() == shoal.load_full_state(session.directory / "checkpoints").keys()
