"""Examples and pages count the run's steps, which are equal on all workers, instead of keeping a
counter of their own."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_SCRIPTS = {
    str(path.relative_to(_ROOT)): path.read_text()
    for path in sorted((_ROOT / "examples").glob("**/*.py"))
    if path.name != "train_plain.py"
}
_PAGES = [
    _ROOT / "README.md",
    *(
        page
        for folder in ("", "guides", "migration", "strategies")
        for page in sorted((_ROOT / "docs" / folder).glob("*.md"))
    ),
]
_SNIPPETS = {
    f"{page.relative_to(_ROOT)} {number}": snippet
    for page in _PAGES
    for number, snippet in enumerate(
        re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    )
}


def own_counts(source: str) -> list[str]:
    """Returns the counters that loops over a loader keep themselves."""
    found = []
    for loop in ast.walk(ast.parse(source)):
        if not isinstance(loop, ast.For):
            continue
        over = ast.unparse(loop.iter)
        if re.match(r"enumerate\(.*loader", over):
            found.append(over)
        if re.search(r"\bloader\b", over):
            found += [
                ast.unparse(node)
                for node in ast.walk(loop)
                if isinstance(node, ast.AugAssign)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.op, ast.Add)
            ]
    return found


def test_no_example_keeps_its_own_counter() -> None:
    counting = {where: own_counts(source) for where, source in (_SCRIPTS | _SNIPPETS).items()}
    assert {where: counts for where, counts in counting.items() if counts} == {}


@pytest.mark.parametrize(
    "source",
    [
        "for i, batch in enumerate(loader): pass",
        "for step, _ in enumerate(loader.steps()): pass",
        "for batch in loader:\n    if optimizer.step():\n        count += 1",
        "for epoch in loader.epochs(3):\n    for batch in loader:\n        count += 1",
    ],
)
def test_scripts_own_counter_is_found(source: str) -> None:
    assert own_counts(source)
