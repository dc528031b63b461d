"""The coordinator's flags and environment variables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from shoal_common.errors import ConfigurationError
from shoal_coordinator.settings import CoordinatorSettings, parse_command_line


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in CoordinatorSettings.model_fields:
        monkeypatch.delenv(f"SHOAL_COORDINATOR_{field.upper()}", raising=False)


def test_coordinator_without_flags_serves_loopback_with_an_embedded_redis() -> None:
    settings = parse_command_line([])
    assert settings.redis.get_secret_value() == "embedded://"
    assert str(settings.listen) == str(settings.http) == "127.0.0.1:0"
    assert settings.reconnect_grace == timedelta(0)
    assert settings.serving_tls is None
    assert settings.token_table.is_open


def test_flags_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_COORDINATOR_LISTEN", "127.0.0.1:7000")
    monkeypatch.setenv("SHOAL_COORDINATOR_RECONNECT_GRACE", "2s")
    settings = parse_command_line(["--listen", "127.0.0.1:8000", "--insecure"])
    assert str(settings.listen) == "127.0.0.1:8000"
    assert settings.reconnect_grace == timedelta(seconds=2)
    assert settings.insecure


def test_every_setting_has_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    flags: set[str] = set()
    add = argparse.ArgumentParser.add_argument

    def noting(self: argparse.ArgumentParser, *names: str, **more: object) -> object:
        flags.update(
            name.removeprefix("--").replace("-", "_") for name in names if name.startswith("--")
        )
        return add(self, *names, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", noting)
    parse_command_line([])
    assert flags - {"help"} == set(CoordinatorSettings.model_fields)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--listen", "nowhere"], "listen"),
        (["--reconnect-grace", "soon"], "reconnect_grace"),
        (["--request-timeout=-1s"], "request_timeout"),
    ],
)
def test_a_wrong_value_is_named_with_its_remedy(arguments: Sequence[str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{named}=.*SHOAL_COORDINATOR_{named.upper()}"):
        parse_command_line(arguments)


def test_the_redis_url_with_its_password_is_in_no_representation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOAL_COORDINATOR_REDIS", "redis://user:hunter2@h:6379")
    settings = parse_command_line([])
    assert settings.redis_url == "redis://user:hunter2@h:6379"
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in str(settings)


def test_unreadable_token_file_is_an_error(tmp_path: Path) -> None:
    settings = parse_command_line(["--tokens", str(tmp_path / "missing")])
    with pytest.raises(ConfigurationError, match="missing"):
        assert settings.token_table
