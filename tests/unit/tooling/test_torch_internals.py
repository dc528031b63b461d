"""torch's names that are not public are taken in one module, which says clearly what a torch
without them is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
INTERNALS = ROOT / "worker/shoal_worker/torch_internals.py"
FOLDERS = [ROOT / name for name in ("worker", "sdk/shoal", "ps_server", "common")]
SOURCES = [path for folder in FOLDERS for path in sorted(folder.rglob("*.py")) if path != INTERNALS]
OPERATIONS = ("torch.ops.", "torch._foreach_", "torch._amp_")
"""Names of operations, which begin with an underscore where they are not meant to be called by
hand, and stay."""


def private_names(tree: ast.AST) -> Iterator[str]:
    """Modules and names of torch with a leading underscore that are imported, or reached from
    `torch` by attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                if any(
                    part.startswith("_") for part in path.split(".")
                ) and not alias.name.startswith("__"):
                    yield path
        elif isinstance(node, ast.Import):
            yield from (
                alias.name
                for alias in node.names
                if alias.name.startswith("torch.") and "._" in alias.name
            )
        elif isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            if (
                path.startswith("torch.")
                and re.match("_[^_]", node.attr)
                and not path.startswith(OPERATIONS)
            ):
                yield path


@pytest.mark.parametrize(
    "line",
    [
        "from torch._C import x",
        "import torch._dynamo",
        "from torch.utils import _pytree",
        "torch.autograd._engine",
    ],
)
def test_a_private_name_is_found(line: str) -> None:
    assert list(private_names(ast.parse(line))) != []


def test_no_other_module_takes_a_private_name_of_torch() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in SOURCES
        if (names := sorted(set(private_names(ast.parse(path.read_text())))))
    }
    assert found == {}, "take it from shoal_worker.torch_internals"


def test_a_torch_without_one_of_them_is_told_by_its_version() -> None:
    script = (
        "import torch; del torch._C._current_graph_task_id; import shoal_worker.torch_internals"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert "Shoal's worker needs a torch of versions 2.11 to 2.13; torch 2." in ended.stderr
    assert "_current_graph_task_id" in ended.stderr
