"""The examples of docs/strategies/pipeline.md run, and print what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "strategies" / "pipeline.md"


def test_the_pages_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text()
    split, example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (shown,) = re.findall(r"```\n(stage .*?)```", text, re.DOTALL)
    exec(compile(split, f"{PAGE}, the split", "exec"), {})
    assert capsys.readouterr().out == shown
    exec(compile(example, f"{PAGE}, the example", "exec"), {"__name__": "example"})
    loss, outputs = re.fullmatch(r"loss (\d\.\d), (\d+) outputs\n", capsys.readouterr().out).groups()  # type: ignore[union-attr]
    assert float(loss) < 0.8
    assert outputs == "32"
