"""torch's private names are used in a single module, which reports clearly if a version of torch
lacks one."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from shoal_worker.backends.worlds import World
from shoal_worker.torch_internals import TESTED, c10d, expected_versions

ROOT = Path(__file__).resolve().parents[3]
INTERNALS = ROOT / "worker/shoal_worker/torch_internals.py"
FOLDERS = [ROOT / name for name in ("worker", "sdk/shoal", "ps_server", "common")]
SOURCES = [path for folder in FOLDERS for path in sorted(folder.rglob("*.py")) if path != INTERNALS]
OPERATIONS = ("torch.ops.", "torch._foreach_", "torch._amp_")
"""Prefixes of operations. Some begin with an underscore because they are not meant to be called
directly; these are allowed."""


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yields the private modules and names of torch that are imported, or reached by attributes
    from `torch` or from what is imported from it."""
    roots = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                roots.add(alias.asname or alias.name)
                path = f"{node.module}.{alias.name}"
                if any(
                    part.startswith("_") for part in path.split(".")
                ) and not alias.name.startswith("__"):
                    yield path
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch."):
                    roots.add(alias.asname or "torch")
                    if "._" in alias.name:
                        yield alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            path = ast.unparse(node)
            if path.partition(".")[0] in roots and not path.startswith(OPERATIONS):
                yield path


@pytest.mark.parametrize(
    "line",
    [
        "from torch._C import x",
        "import torch._dynamo",
        "from torch.utils import _pytree",
        "torch.autograd._engine",
        "from torch.autograd import Variable as V; V._execution_engine",
        "import torch.distributed as dist; dist._reconfigure",
    ],
)
def test_a_private_name_is_found(line: str) -> None:
    assert list(private_names(ast.parse(line))) != []


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in SOURCES
        if (names := sorted(set(private_names(ast.parse(path.read_text())))))
    }
    assert found == {}, "take it from shoal_worker.torch_internals"


def test_torch_without_a_private_name_fails_the_import_with_that_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    with pytest.raises(ImportError, match=r"is installed and lacks .*_current_graph_task_id"):
        runpy.run_path(str(INTERNALS))


def test_torch_beyond_the_tested_versions_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    major, minor = TESTED[1]
    monkeypatch.setattr(torch, "__version__", f"{major}.{minor + 1}.0+cpu")
    # exists from 2.15 on
    monkeypatch.setattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set(), raising=False)
    with pytest.warns(UserWarning, match="Shoal is tested with torch") as warned:
        runpy.run_path(str(INTERNALS))
    assert [str(one.message) for one in warned] == [
        f"Shoal is tested with torch {expected_versions()}; torch {torch.__version__} is newer and "
        "may behave differently"
    ]


def test_the_page_on_installing_names_the_expected_versions() -> None:
    assert f"torch {expected_versions()}" in (ROOT / "docs/install.md").read_text()


def test_world_of_one_thread_has_the_attributes_of_torchs() -> None:
    derived = {"pg_config_info"}  # computed by torch for dumps
    names = {name for name in dir(type(c10d._world)) if not name.startswith("_")} - derived
    assert {name for name in names if not hasattr(World(), name)} == set()
