"""The commands that a warm process may run."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest
from shoal.launcher.workers.warm_commands import Verdict, judge

WARM, FRESH = Verdict(warm=True), Verdict(warm=False)


def judged(script: Path, text: str, **environment: str) -> Verdict:
    script.write_text(text)
    return judge((sys.executable, "-u", str(script), "--flag"), environment)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("import torch", WARM),
        ("def later():\n    from transformers import Trainer", WARM),
        ("from . import model", WARM),
        ("import importlib; importlib.import_module(name)", WARM),
        ("import os, json.decoder\nfrom pathlib import Path", FRESH),
        ("import torch\nx = = 1", FRESH),
    ],
)
def test_a_script_is_forked_if_it_may_import_torch(
    script: Path, text: str, verdict: Verdict
) -> None:
    assert judged(script, text) == verdict


@pytest.mark.parametrize(
    "line",
    [
        "os.environ['OMP_NUM_THREADS'] = '3'",
        "environ['OMP_NUM_THREADS'] += '3'",
        "os.environ.setdefault('OMP_NUM_THREADS', '3')",
        "os.environ.update({'A': '1', 'OMP_NUM_THREADS': '3'})",
        "os.environ.update(OMP_NUM_THREADS='3')",
        "os.putenv('OMP_NUM_THREADS', '3')",
        "os.environ |= {'A': '1', 'OMP_NUM_THREADS': '3'}",
    ],
)
def test_script_that_sets_variables_read_by_torchs_import_starts_fresh(
    script: Path, line: str
) -> None:
    verdict = judged(script, f"import os, torch\nfrom os import environ\nif True:\n    {line}")
    assert not verdict.warm
    assert "sets OMP_NUM_THREADS" in verdict.reason


@pytest.mark.parametrize(
    "name",
    [
        "TMPDIR",
        "PROMETHEUS_MULTIPROC_DIR",
        "ATEN_CPU_CAPABILITY",
        "NPY_PROMOTION_STATE",
        "SYMPY_DEBUG",
    ],
)
def test_variables_read_on_import_by_dependencies_count(script: Path, name: str) -> None:
    assert (
        f"sets {name}"
        in judged(script, f"import os\nos.environ['{name}'] = 'x'\nimport torch").reason
    )


@pytest.mark.filterwarnings("error")
def test_syntax_warnings_of_a_script_are_left_to_its_workers(script: Path) -> None:
    assert judged(script, "import torch\ntext = '\\d'") == WARM


def test_a_script_that_the_parser_cannot_represent_starts_fresh(script: Path) -> None:
    assert judged(script, "import torch\nx = " + "-" * 200_000 + "1") == FRESH


def test_pipe_is_left_for_the_worker_to_read(script: Path) -> None:
    os.mkfifo(script)
    assert judge((sys.executable, "-u", str(script)), {}) == FRESH


def test_script_may_set_variables_read_later_and_read_any(script: Path) -> None:
    text = (
        "import os, torch\nos.environ['CUDA_VISIBLE_DEVICES'] = "
        "'0'\nos.environ['OMP_NUM_THREADS']\nos.getenv('TORCH_LOGS')"
    )
    assert judged(script, text) == WARM


def test_workers_start_fresh_under_tools_that_trace_programs(script: Path) -> None:
    assert judged(script, "import torch", COVERAGE_PROCESS_START="rc") == Verdict(
        warm=False, reason="COVERAGE_PROCESS_START is set"
    )


def test_other_programs_start_fresh_silently(tmp_path: Path) -> None:
    archive = tmp_path / "train.pyz"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("__main__.py", "import torch")
    for command in (
        ("/bin/true",),
        (sys.executable, "-c", "import torch"),
        (sys.executable, "-u", str(archive)),
        (sys.executable,),
    ):
        assert judge(command, {}) == FRESH


def test_modules_are_inspected_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "unknown_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('it was imported')")
    (package / "__main__.py").write_text("import json")
    (package / "train.py").write_text("import torch")
    assert judge((sys.executable, "-u", "-m", "unknown_package"), {}) == FRESH
    assert judge((sys.executable, "-u", "-m", "unknown_package.train"), {}) == WARM
    assert judge((sys.executable, "-u", "-m", "there_is_none.such"), {}) == WARM
