"""A docstring can be read alone: it does not begin in the middle of a sentence whose beginning
stands elsewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_FRAGMENT = re.compile(r"(Of|As|Any) ")
"""What such a docstring begins with."""


def test_no_docstring_is_the_end_of_a_sentence() -> None:
    found = []
    for package in ("worker/shoal_worker", "common", "coordinator", "ps_server", "sdk"):
        for file in sorted((_ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if (
                    isinstance(node, ast.Expr)
                    and isinstance(node.value, ast.Constant)
                    and isinstance(node.value.value, str)
                ):
                    text = node.value.value.strip()
                    if _FRAGMENT.match(text):
                        found.append(f"{file.relative_to(_ROOT)}:{node.lineno}: {text[:60]}")
    assert not found, "\n".join(found)
