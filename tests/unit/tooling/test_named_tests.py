"""References in pages and docstrings exist: the tests and functions that pages name, and the files
that the explanation pages name. The index of decisions lists all decisions, and a folder's
docstring its modules."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest
from shoal_worker.strategies import registry

_ROOT = Path(__file__).parents[3]
_WORKER = _ROOT / "worker/shoal_worker"
_DECISIONS = _ROOT / "docs/decisions"
_FOLDERS = sorted(path.parent for path in _WORKER.rglob("__init__.py") if path.parent != _WORKER)
_OTHERS = ("parse_compression", "parallelize_module")
"""Functions that docstrings of folders name."""


@pytest.mark.parametrize(
    "page", ["docs/promises.md", "docs/torch-calls.md", "docs/parameter-servers.md"]
)
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = re.findall(r"`([\w/]*(?:test_\w+\.py|\w+/\w+\.txt)[^`]*)`", (_ROOT / page).read_text())
    missing = [name for name in named if not _exists(name)]
    assert not missing


def test_functions_named_in_the_tour_of_a_step_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)::([\w.]+)`", (_ROOT / "docs/architecture.md").read_text())
    assert len(named) > 30
    missing = [
        (file, name)
        for file, name in named
        if not _defined(_ROOT / "worker/shoal_worker" / file, name.split("."))
    ]
    assert not missing


def test_docstring_of_a_folder_lists_its_modules(subtests: pytest.Subtests) -> None:
    for folder in _FOLDERS:
        with subtests.test(str(folder.relative_to(_WORKER))):
            docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
            there = {path.stem for path in folder.iterdir() if _is_module(path)}
            if folder.name == "strategies":  # the strategies are listed in the registry
                there -= set(registry.names())
            named = set(re.findall(r"`([a-z]\w*)`", docstring))
            assert there - named == set(), "modules missing in the docstring"
            assert named - there - set(_OTHERS) == set(), "names of modules that do not exist"


def _is_module(path: Path) -> bool:
    named = path.stem not in ("__init__", "__main__")
    return named and (path.suffix == ".py" or (path / "__init__.py").exists())


def test_the_modules_that_the_architecture_page_names_exist() -> None:
    page = (_ROOT / "docs/architecture.md").read_text()
    packages = [folder.name for folder in _FOLDERS if folder.parent == _WORKER]
    named = set(re.findall(rf"(?<![\w/])((?:{'|'.join(packages)})(?:/\w+)+)\b(?!\.md)", page))
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


def test_every_decision_is_in_the_index() -> None:
    index = (_DECISIONS / "README.md").read_text()
    named = re.findall(r"^- \[[^\]]*\]\(([^)]*)\)", index, re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in _DECISIONS.glob("[0-9]*.md"))


def test_every_decision_has_its_parts_and_is_short(subtests: pytest.Subtests) -> None:
    for path in sorted(_DECISIONS.glob("[0-9]*.md")):
        with subtests.test(path.name):
            text = path.read_text()
            assert text.startswith(f"# {int(path.name[:4])}. ")
            assert re.search(r"^\*\*Status:\*\* \w+, \d{4}-\d\d-\d\d", text, re.MULTILINE)
            parts = re.findall(r"^\*\*([\w ]+)\.\*\*", text, re.MULTILINE)
            assert parts == ["Context", "Decision", "Rejected alternatives", "Consequences"]
            assert 100 <= len(text.split()) <= 320


def test_the_files_that_the_explanation_pages_name_exist() -> None:
    named = {
        (page.name, name)
        for page in (_ROOT / "docs/explanation").glob("*.md")
        for name in re.findall(r"`((?:\w+/)+\w+\.\w+|\w+\.py)`", page.read_text())
    }
    assert len(named) > 50
    listed = _listed()
    assert [
        (page, name)
        for page, name in sorted(named)
        if not any(f"/{file}".endswith(f"/{name}") for file in listed)
    ] == []


def test_the_sections_of_pages_that_code_refers_to_exist() -> None:
    named = {
        (file, page, section)
        for file in _listed("*.py", "*.proto")
        for page, section in re.findall(
            r"(docs/(?:explanation|decisions)/[\w-]+\.md)(?:#([\w-]+))?", (_ROOT / file).read_text()
        )
    }
    assert len(named) > 30
    assert [each for each in sorted(named) if not _has_section(*each[1:])] == []


def _listed(*patterns: str) -> list[str]:
    """Returns the files of the repository that match the patterns."""
    command = ["git", "ls-files", *patterns]
    ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
    return ended.stdout.split()


def _has_section(page: str, section: str) -> bool:
    path = _ROOT / page
    if not path.exists():
        return False
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return not section or section in {
        re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-") for heading in headings
    }


def _exists(name: str) -> bool:
    path, _, test = name.partition("::")
    files = [file for file in _tests() if file.endswith(f"/{path}")]
    return any(
        f"def {test.split('[')[0].removesuffix('...')}" in Path(file).read_text() or not test
        for file in files
    )


@functools.cache
def _tests() -> list[str]:
    """Returns the paths of all test files and scenarios."""
    return [str(path) for kind in ("*.py", "*.txt") for path in (_ROOT / "tests").rglob(kind)]
