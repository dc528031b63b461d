"""docs/migration/classifier.md: its scripts, its differences, its commands, and their output."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import shoal
import torch

from tests.integration.pages.before_and_after import (
    ROOT,
    assert_shows_every_difference,
    newest_states,
    printed_by,
)
from tests.sessions import Session, blocks_of

PAGE = ROOT / "docs" / "migration" / "classifier.md"
SCRIPTS = ROOT / "examples" / "classifier"


def test_page_shows_every_difference_between_the_scripts() -> None:
    assert_shows_every_difference(PAGE, SCRIPTS)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_script_before_the_changes_trains_and_resumes(tmp_path: Path) -> None:
    shutil.copytree(SCRIPTS, tmp_path, dirs_exist_ok=True)
    *epochs, best = printed_by(tmp_path, "train_plain.py", "--epochs", "8")
    losses = [float(loss) for line in epochs for loss in re.findall("mean loss (.*),", line)]
    assert len(losses) == 8
    assert losses[-1] < 0.5 * losses[0]
    again = printed_by(tmp_path, "train_plain.py", "--epochs", "8", "--resume", "last.pt")
    assert again == [best], "no epoch was left"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_worker_changes_the_result_of_the_script_after_the_changes_only_by_rounding(
    session: Session,
) -> None:
    """In float64, so that training does not amplify rounding errors beyond the tolerance."""
    script = (SCRIPTS / "train.py").read_text()
    assert script.count("float32") == 1
    (session.directory / "train.py").write_text(
        script.replace("float32", "float64").replace(
            "torch.manual_seed(0)", "torch.manual_seed(0)\ntorch.set_default_dtype(torch.float64)"
        )
    )
    session.follow(blocks_of(PAGE))
    assert any("ended with SIGKILL" in said for _, said in session.printed)
    for average in (None, 0):
        undisturbed, disturbed = newest_states(session.directory, average)
        assert int(undisturbed["1.num_batches_tracked"]) == 900
        for name, value in undisturbed.items():
            torch.testing.assert_close(disturbed[name], value, rtol=0, atol=1e-6)
    alone, *others = (
        [float(loss) for loss in re.findall("mean loss (.*),", said)]
        for command, said in session.printed
        if "train.py" in command
    )
    assert len(alone) == 60
    assert others == [pytest.approx(alone, abs=1.1e-4)]
    best = shoal.load_full_state(session.directory / "checkpoints", best=True, average=0)
    model = torch.load(session.directory / "model.pt")
    assert best.keys() == model.keys()
    assert all(torch.equal(best[name], model[name]) for name in best)
