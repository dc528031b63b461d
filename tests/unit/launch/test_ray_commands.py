"""Commands of the actors of a run on Ray. Ray is not needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from shoal.ray.command import Command, CommandActor


def test_users_file_does_not_shadow_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts its actors in the directory of the user's files."""
    (tmp_path / "this.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    command = Command(module="this", arguments=(), environment={})
    assert CommandActor("node").run(command).status == 0
