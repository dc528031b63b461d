"""Pages of docs/ whose examples tests run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_DOCS = Path(__file__).parents[1] / "docs"


def run_examples(page: str, *, shown: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a page's two examples in this process. Checks that the first prints the page's block
    that begins with `shown`. Returns the output of the second."""
    text = (_DOCS / page).read_text()
    first, second = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (expected,) = re.findall(rf"```\n({re.escape(shown)}.*?)```", text, re.DOTALL)
    exec(compile(first, f"{page}, the first example", "exec"), {})
    assert capsys.readouterr().out == expected
    exec(compile(second, f"{page}, the second example", "exec"), {"__name__": "example"})
    return capsys.readouterr().out


def example(page: str) -> str:
    """Returns the code of a page's only example."""
    (found,) = examples(page)
    return found


def examples(page: str) -> list[str]:
    """Returns the code of a page's examples in order."""
    return re.findall(r"```python\n(.*?)```", (_DOCS / page).read_text(), re.DOTALL)
