"""The script of docs/guides/trl.md, word by word, trains on two workers, saves, and writes the
adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.sessions import Session, blocks_of

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "trl.md"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps TRL from reporting to the Hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.usefixtures("offline")
def test_the_script_trains_and_writes_the_adapter(session: Session) -> None:
    session.follow(blocks_of(PAGE))
    assert (session.directory / "out" / "step-18").is_dir()
    written = load_file(session.directory / "adapter" / "adapter_model.safetensors")
    assert all("lora_" in name for name in written)
    assert any(value.any() for name, value in written.items() if "lora_B" in name)
