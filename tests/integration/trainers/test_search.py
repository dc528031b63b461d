"""examples/search.py: an Optuna study whose trials are runs, one of which loses its main process at
a critical moment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import optuna
import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "search.py"
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "hyper-parameter-search.md"

KILLS = """
import os
import signal

import optuna

plain = optuna.Trial.report


def report(self, value, step):
    plain(self, value, step)
    if step == 2 and not os.path.exists("killed"):
        open("killed", "x").close()
        os.kill(os.getpid(), signal.SIGKILL)


optuna.Trial.report = report
"""
"""Kills the process that reports to Optuna, after its report and before the others have the
decision."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def search(directory: Path, *arguments: str, patch: str = "") -> str:
    """Runs the example in `directory` and returns its stderr."""
    directory.mkdir(exist_ok=True)
    script = directory / "search.py"
    shutil.copy(EXAMPLE, script)
    script.write_text(
        script.read_text().replace("import optuna\n", f"{patch or 'import optuna'}\n")
    )
    ended = subprocess.run(
        [sys.executable, script, *arguments],
        check=False,
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return ended.stderr


def test_trials_survive_a_kill_and_report_each_epoch_once(tmp_path: Path) -> None:
    said = search(tmp_path / "search", patch=KILLS)
    assert "ended with SIGKILL; continuing" in said
    study = optuna.load_study(
        study_name="digits", storage=f"sqlite:///{tmp_path / 'search' / 'search.db'}"
    )
    states = [trial.state.name for trial in study.trials]
    assert sorted(set(states)) == ["COMPLETE", "PRUNED"], states
    first = study.trials[0]
    assert sorted(first.intermediate_values) == [*range(10)]

    (tmp_path / "alone").mkdir()
    alone = optuna.create_study(
        study_name="digits", storage=f"sqlite:///{tmp_path / 'alone' / 'search.db'}"
    )
    trial = alone.ask()
    search(tmp_path / "alone", str(trial._trial_id), str(first.params["lr"]))
    assert first.intermediate_values == pytest.approx(alone.trials[0].intermediate_values, rel=1e-4)


def test_the_guide_shows_the_functions_of_the_example() -> None:
    """The guide leaves out their docstrings."""
    lines = [line for line in EXAMPLE.read_text().splitlines() if not line.startswith('    """')]
    for block in GUIDE.read_text().split("```python\n")[1:]:
        assert block.partition("```")[0].rstrip() in "\n".join(lines)
