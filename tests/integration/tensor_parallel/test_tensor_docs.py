"""The examples of docs/strategies/tensor.md run, and print what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "strategies" / "tensor.md"


def test_the_pages_examples_run(capsys):
    text = PAGE.read_text()
    plan, example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (shown,) = re.findall(r"```\n(module .*?)```", text, re.DOTALL)
    exec(compile(plan, f"{PAGE}, the plan", "exec"), {})
    assert capsys.readouterr().out == shown
    exec(compile(example, f"{PAGE}, the example", "exec"), {"__name__": "example"})
