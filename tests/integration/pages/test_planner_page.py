"""docs/planner.md: the commands print what it shows, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import shoal
import torch

from benchmarks.workers import blocks
from tests.sessions import Session, blocks_of

PAGE = Path(__file__).parents[3] / "docs" / "planner.md"


@pytest.mark.slow
def test_a_plan_is_printed_as_the_page_shows(session: Session) -> None:
    session.follow(blocks_of(PAGE))


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    with torch.device("meta"):
        model = blocks.Decoder(64)
        words = torch.zeros(2, blocks.TOKENS, dtype=torch.long)
    names = {
        "shoal": shoal,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "words": words,
        "loss_fn": blocks.loss_fn,
    }
    exec(compile(example, PAGE.name, "exec"), names)
    assert "recommended: shoal.as_distributed(" in capsys.readouterr().out
