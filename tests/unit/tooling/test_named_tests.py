"""Pages name the tests that hold what they promise: those exist. So do the functions by which a
page follows a step. The index of decisions names all of them, and a folder's docstring its
modules."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from shoal_worker.strategies import registry

_ROOT = Path(__file__).parents[3]
_WORKER = _ROOT / "worker/shoal_worker"
_FOLDERS = sorted(path.parent for path in _WORKER.rglob("__init__.py") if path.parent != _WORKER)
_OTHERS = ("parse_compression", "parallelize_module")
"""What else folders' docstrings name: functions."""
_TESTS = sorted(
    path
    for path in (_ROOT / "tests").rglob("*")
    if path.is_file() and path.suffix in (".py", ".txt")
)


@pytest.mark.parametrize(
    "page", ["docs/elastic.md", "docs/torch-calls.md", "docs/parameter-servers.md"]
)
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = re.findall(r"`([\w/]*(?:test_\w+\.py|\w+/\w+\.txt)[^`]*)`", (_ROOT / page).read_text())
    missing = [name for name in named if not _exists(name)]
    assert not missing


def test_the_functions_by_which_a_step_is_followed_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)::([\w.]+)`", (_ROOT / "docs/architecture.md").read_text())
    assert len(named) > 30
    missing = [
        (file, name)
        for file, name in named
        if not _defined(_ROOT / "worker/shoal_worker" / file, name.split("."))
    ]
    assert not missing


def test_a_folders_docstring_is_its_table_of_contents(subtests: pytest.Subtests) -> None:
    for folder in _FOLDERS:
        with subtests.test(str(folder.relative_to(_WORKER))):
            docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
            there = {path.stem for path in folder.iterdir() if _is_module(path)}
            if folder.name == "strategies":  # those are listed in its registry
                there -= set(registry.names())
            named = set(re.findall(r"`([a-z]\w*)`", docstring))
            assert there - named == set(), "modules that it leaves out"
            assert named - there - set(_OTHERS) == set(), "names of modules that are not there"


def _is_module(path: Path) -> bool:
    named = path.stem not in ("__init__", "__main__")
    return named and (path.suffix == ".py" or (path / "__init__.py").exists())


def test_the_modules_that_the_architecture_page_names_exist() -> None:
    page = (_ROOT / "docs/architecture.md").read_text()
    packages = [folder.name for folder in _FOLDERS]
    named = set(re.findall(rf"\b((?:{'|'.join(packages)})/\w+)\b(?!\.md|/)", page))
    assert len(named) > 30
    assert not {
        name
        for name in named
        if not (_WORKER / f"{name}.py").exists() and not (_WORKER / name).is_dir()
    }


def _defined(file: Path, names: list[str]) -> bool:
    within: ast.AST = ast.parse(file.read_text())
    for name in names:
        kinds = (ast.ClassDef, ast.FunctionDef)
        found = [
            node
            for node in ast.iter_child_nodes(within)
            if isinstance(node, kinds) and node.name == name
        ]
        if not found:
            return False
        within = found[0]
    return True


def test_every_decision_is_in_the_index_once() -> None:
    folder = _ROOT / "docs/decisions"
    named = re.findall(r"\]\(([^)]*)\)", (folder / "README.md").read_text())
    assert sorted(named) == sorted(path.name for path in folder.glob("[0-9]*.md"))


def _exists(name: str) -> bool:
    path, _, test = name.partition("::")
    files = [file for file in _TESTS if f"/{file.relative_to(_ROOT)}".endswith(f"/{path}")]
    return any(
        f"def {test.split('[')[0].removesuffix('...')}" in file.read_text() or not test
        for file in files
    )
