"""The examples in the documents that are not a strategy's run, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import shoal

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("page", ["checkpoints.md", "fitting.md", "observability.md"])
def test_the_examples_of_a_page_run_one_after_the_other(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    assert examples
    monkeypatch.chdir(tmp_path)
    shoal.launch(lambda: exec(compile("\n".join(examples), page, "exec"), {"__name__": "example"}), world_size=2)
