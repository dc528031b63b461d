"""Credentials that callers present and services require, as flags, variables and files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic_settings import SettingsConfigDict
from shoal_common.credentials import CallerSettings, ServiceSettings, read_secret
from shoal_common.errors import ConfigurationError
from shoal_coordinator.settings import parse_command_line as coordinator
from shoal_ps_server.settings import parse_command_line as ps_server

PS = ["--coordinator", "localhost:1", "--job", "j"]


class Service(ServiceSettings, CallerSettings):
    """Settings like those of the parameter servers."""

    model_config = SettingsConfigDict(env_prefix="SHOAL_TEST_")


@pytest.fixture(autouse=True)
def without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SHOAL_T")]:
        monkeypatch.delenv(name)


def test_token_comes_from_its_file_or_the_variable_and_the_file_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CallerSettings.load().bearer_token is None
    monkeypatch.setenv("SHOAL_TOKEN", "from the variable")
    assert CallerSettings.load().bearer_token == "from the variable"
    (tmp_path / "token").write_text("from-a-file\n")
    monkeypatch.setenv("SHOAL_TOKEN_FILE", str(tmp_path / "token"))
    settings = CallerSettings.load()
    assert settings.bearer_token == "from-a-file"
    assert "variable" not in repr(settings)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot read the file"),
        ("", "is empty"),
        ("a\nb\n", "several lines"),
        ("h\u00fcnter\n", "other than printable ASCII"),
    ],
)
def test_file_without_exactly_one_secret_is_named(
    tmp_path: Path, content: str | None, complaint: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=complaint) as refused:
        read_secret(path, "token-file")
    assert str(path) in str(refused.value)


def test_certificates_enable_tls_and_a_client_ca_makes_it_mutual() -> None:
    ca, certificate, key = Path("/ca"), Path("/cert"), Path("/key")
    assert Service.load().calling_tls is None
    assert Service.load().serving_tls is None
    both = Service.load(tls_ca=ca, tls_cert=certificate, tls_key=key, tls_client_ca=ca)
    assert both.calling_tls is not None
    assert (both.calling_tls.authority, both.calling_tls.client_authority) == (ca, None)
    assert both.serving_tls is not None
    assert (both.serving_tls.authority, both.serving_tls.client_authority) == (None, ca)
    with pytest.raises(
        ConfigurationError, match="--tls-client-ca /ca requires TLS, but --tls-cert"
    ):
        _ = Service.load(tls_client_ca=ca).serving_tls


def test_variable_under_its_former_name_is_not_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOAL_TEST_TLS_CERTIFICATE", "/cert.pem")
    with pytest.raises(
        ConfigurationError, match="SHOAL_TEST_TLS_CERTIFICATE was renamed to SHOAL_TEST_TLS_CERT"
    ):
        Service.load()


@pytest.mark.parametrize(
    ("parse", "arguments", "remedy"),
    [
        (ps_server, [*PS, "--token", "hunter2"], "--token-file FILE"),
        (coordinator, ["--redis", "redis://u:hunter2@h:1"], "--redis-file FILE"),
        (coordinator, ["--redis", "rediss://:hunter2@h:1"], "SHOAL_COORDINATOR_REDIS"),
        (coordinator, ["--redis", "redis://h:1?password=hunter2"], "--redis-file FILE"),
        (coordinator, ["--store-url", "redis://u:hunter2@h:1"], "SHOAL_COORDINATOR_STORE_URL"),
    ],
)
def test_secrets_are_never_taken_from_the_arguments(
    parse, arguments: list[str], remedy: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse(arguments)
    assert refused.value.reason == "SECRET_IN_ARGUMENTS"
    assert remedy in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_redis_url_with_a_password_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("redis://u:hunter2@h:1\n")
    settings = coordinator(["--redis-file", str(tmp_path / "url")])
    assert settings.redis_url == "redis://u:hunter2@h:1"
    assert "hunter2" not in repr(settings)


def test_server_with_tls_for_its_calls_serves_over_tls(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="would call others over TLS but serve in plain text"
    ):
        ps_server([*PS, "--tls-ca", "/ca.pem"])
    assert ps_server([*PS, "--tls-ca", "/ca.pem", "--insecure"]).serving_tls is None


def test_secrets_removed_from_the_environment_are_available_but_not_inherited() -> None:
    script = """
import os, subprocess, sys
from shoal_common.security.secrets import take_secrets

take_secrets()
take_secrets()
from shoal_common.credentials import CallerSettings
from shoal_worker.settings import WorkerSettings

assert CallerSettings.load().bearer_token == WorkerSettings().bearer_token == "hunter2"
assert WorkerSettings().store_at("redis://told:1") == "redis://:hunter3@h:1"
inherited = subprocess.run(
    [sys.executable, "-c", "import os; print(os.environ)"],
    capture_output=True,
    text=True,
    check=True,
).stdout
assert "hunter" not in inherited, inherited
"""
    environment = {
        **os.environ,
        "SHOAL_TOKEN": "hunter2",
        "SHOAL_STORE_URL": "redis://:hunter3@h:1",
    }
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)
