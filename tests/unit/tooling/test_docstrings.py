"""Docstrings can be read alone: none begins with a relative clause, in the middle of a sentence,
only refers to another docstring, or breaks off without a full stop.

Attribute docstrings, which are string expressions after an assignment, count as well. The docstring
of a flag begins with "True if", that of a function which returns one with "Returns whether".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_FOLDERS = (
    "benchmarks",
    "common",
    "coordinator",
    "docker",
    "docsite",
    "examples",
    "gpu_kit",
    "ps_server",
    "sdk",
    "tests",
    "worker",
)
_CLAUSE = re.compile(
    r"(What|Whether|Where|How|Who|Whom|Whose|Which|When|Why|Whatever|Whoever|Wherever|While|If|Because"
    r"|That|Those|Of|As|Any) "
)
_END = re.compile(r"[.:!?)`\"|]$")
_REFERENCE = re.compile(r"See (`[^`]+`|[\w.]+|the \w+)([.:]|$)")


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    nodes: list[ast.AST] = [tree]
    for node in nodes:  # statements alone, of which a tree has a tenth as many as nodes
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            nodes.extend(getattr(node, block, ()))
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value


def _is_faulty(text: str) -> bool:
    """Returns whether a docstring has one of the faults described in the module's docstring."""
    first = text.partition("\n\n")[0]
    return bool(_CLAUSE.match(text) or _REFERENCE.match(text) or not _END.search(first))


@pytest.mark.parametrize("folder", _FOLDERS)
def test_docstrings_are_self_contained(folder: str) -> None:
    found = []
    for file in sorted((_ROOT / folder).rglob("*.py")):
        if file.stem.endswith(("_pb2", "_pb2_grpc")) or ".venv" in file.parts:
            continue
        for docstring in _docstrings(ast.parse(file.read_text())):
            text = str(docstring.value).strip()
            if _is_faulty(text):
                found.append(f"{file.relative_to(_ROOT)}:{docstring.lineno}: {text[:60]}")
    assert not found, (
        "begin with a verb in the third person (Returns ..., Checks ...) or with a noun, and end "
        "with a full stop:\n" + "\n".join(found)
    )


@pytest.mark.parametrize(
    ("text", "faulty"),
    [
        ("What a rank holds.", True),
        ("Whether the rank is alive.", True),
        ("True if the rank is alive.", False),
        ("See `Engine`.", True),
        ("Of a step.", True),
        ("Returns whether the rank is alive.", False),
        ("Number of ranks; see `Engine`.", False),
        ("Number of ranks", True),
    ],
)
def test_docstring_check_finds_faulty_ones(text: str, faulty: bool) -> None:
    assert _is_faulty(text) is faulty
