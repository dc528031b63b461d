"""The examples of docs/strategies/pipeline.md run, and print what the page shows."""

from __future__ import annotations

import re

import pytest

from tests.pages import run_examples


@pytest.mark.usefixtures("fresh_session")
def test_the_pages_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    said = run_examples("strategies/pipeline.md", shown="stage ", capsys=capsys)
    (loss,) = re.findall(r"^loss (\d\.\d), 32 outputs\n$", said)
    assert float(loss) < 0.3
