"""The examples of docs/strategies/tensor.md run, and print what the page shows."""

from __future__ import annotations

import pytest

from tests.pages import run_examples


@pytest.mark.usefixtures("fresh_session")
def test_the_pages_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    run_examples("strategies/tensor.md", shown="module ", capsys=capsys)
