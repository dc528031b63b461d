"""Schedules that once went wrong, one file each: its name is the sentence that must be true."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation import oracle
from tests.simulation.scenario import parse

_FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("file", _FILES, ids=[file.stem.replace("_", " ") for file in _FILES])
def test_scenario(file: Path) -> None:
    verdict = oracle.run(parse(file.read_text()))
    assert verdict.ok, f"\n{verdict.scenario}\n\n{verdict}"
