"""Values that people write: durations, addresses and environment variables, and the errors for
wrong ones."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from pydantic_settings import SettingsConfigDict
from shoal_common.errors import ConfigurationError
from shoal_common.settings import (
    Address,
    AddressField,
    Duration,
    LocalDirectory,
    ShoalSettings,
    parse_address,
    parse_duration,
    secret_value,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("250ms", timedelta(milliseconds=250)),
        ("1.5s", timedelta(seconds=1.5)),
        (" 2 m ", timedelta(minutes=2)),
        ("1h", timedelta(hours=1)),
        ("1d", timedelta(days=1)),
        ("10us", timedelta(microseconds=10)),
        ("0s", timedelta(0)),
    ],
)
def test_durations_have_a_number_and_a_unit(text, expected):
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10",
        "s",
        "-1s",
        "1 week",
        "1e3s",
        "nans",
        "infs",
        "1,5s",
        "1s2m",
        "١s",
        "9" * 400 + "d",
        "4000d",
    ],
)
def test_other_durations_are_refused_with_the_value_and_a_remedy(text):
    with pytest.raises(ConfigurationError, match="duration"):
        parse_duration(text)


@given(st.integers(0, 10**9), st.sampled_from(["us", "ms", "s"]))
def test_durations_are_exact_to_the_microsecond(number, unit):
    scale = {"us": 1, "ms": 1000, "s": 1_000_000}[unit]
    if number * scale <= 3650 * 86400 * 1_000_000:
        assert parse_duration(f"{number}{unit}") == timedelta(microseconds=number * scale)


@given(st.text(max_size=30))
def test_no_text_raises_another_error_in_the_parsers(text):
    for parse in (parse_duration, parse_address):
        with contextlib.suppress(ConfigurationError):
            parse(text)


def test_long_value_is_shown_truncated():
    with pytest.raises(ConfigurationError) as refused:
        parse_duration("x" * 10_000)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:0", "127.0.0.1", 0, True),
        ("127.8.8.8:1", "127.8.8.8", 1, True),
        ("localhost:7000", "localhost", 7000, True),
        ("[::1]:7000", "::1", 7000, True),
        ("0.0.0.0:7000", "0.0.0.0", 7000, False),
        ("[::]:65535", "::", 65535, False),
        ("coordinator-1.shoal_net:7000", "coordinator-1.shoal_net", 7000, False),
    ],
)
def test_addresses_are_host_and_port(text, host, port, loopback):
    address = parse_address(text)
    assert address == Address(host, port)
    assert address.is_loopback is loopback
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7000",
        ":7000",
        "host",
        "host:",
        "host:x",
        "host:65536",
        "host:" + 5000 * "9",
        "host:-1",
        "host:٣",
        "::1:7000",
        "[::1]",
        "[x]:1",
        "a b:1",
        "http://a:1",
        "host:000001",
    ],
)
def test_other_addresses_are_refused_with_the_value_and_a_remedy(text):
    with pytest.raises(ConfigurationError, match="expected HOST:PORT"):
        parse_address(text)


class DemoSettings(ShoalSettings):
    model_config = SettingsConfigDict(env_prefix="SHOAL_DEMO_")

    listen: AddressField = "127.0.0.1:0"
    lease: Duration = timedelta(seconds=5)
    workers: int = 1
    data_dir: LocalDirectory | None = None
    token: SecretStr | None = None


class NeedySettings(ShoalSettings):
    model_config = SettingsConfigDict(env_prefix="SHOAL_NEEDY_")

    coordinator: AddressField


def test_arguments_override_the_environment_and_the_environment_overrides_defaults(monkeypatch):
    monkeypatch.setenv("SHOAL_DEMO_LEASE", "2s")
    monkeypatch.setenv("SHOAL_DEMO_WORKERS", "3")
    monkeypatch.setenv("SHOAL_DEMO_LISTEN", "")
    settings = DemoSettings.load(workers=4, lease=None)
    assert (settings.lease, settings.workers, settings.listen) == (
        timedelta(seconds=2),
        4,
        Address("127.0.0.1", 0),
    )


def test_relative_directory_is_resolved_when_settings_are_loaded(monkeypatch, tmp_path):
    monkeypatch.setenv("SHOAL_DEMO_DATA_DIR", "data")
    monkeypatch.chdir(tmp_path)
    settings = DemoSettings.load()
    monkeypatch.chdir("/")
    assert settings.data_dir.absolute() == tmp_path / "data"


@pytest.mark.parametrize(
    ("variable", "value", "parts"),
    [
        ("SHOAL_DEMO_LEASE", "soon", ["lease='soon'", "250ms", "SHOAL_DEMO_LEASE", "--lease"]),
        ("SHOAL_DEMO_LISTEN", "nowhere", ["listen='nowhere'", "HOST:PORT", "SHOAL_DEMO_LISTEN"]),
        ("SHOAL_DEMO_WORKERS", "many", ["workers='many'", "integer", "SHOAL_DEMO_WORKERS"]),
        ("SHOAL_DEMO_DATA_DIR", "s3://b/x", ["s3://b/x", "on this machine", "SHOAL_DEMO_DATA_DIR"]),
        ("SHOAL_DEMO_DATA_DIR", "gs:/b", ["gs:/b", "not a URL", "SHOAL_DEMO_DATA_DIR"]),
    ],
)
def test_a_bad_value_becomes_one_error_with_field_value_and_remedy(
    monkeypatch, variable, value, parts
):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as refused:
        DemoSettings.load()
    assert all(part in str(refused.value) for part in parts)
    assert "\n" not in str(refused.value)


def test_all_mistakes_are_reported_at_once_including_unknown_arguments():
    with pytest.raises(ConfigurationError) as refused:
        DemoSettings.load(lease="soon", wrokers=3)
    assert "lease='soon'" in str(refused.value)
    assert "wrokers" in str(refused.value)


def test_a_missing_value_is_named_with_its_variable(monkeypatch):
    monkeypatch.delenv("SHOAL_NEEDY_COORDINATOR", raising=False)
    with pytest.raises(
        ConfigurationError, match=r"coordinator: .*--coordinator or SHOAL_NEEDY_COORDINATOR"
    ):
        NeedySettings.load()


def test_secrets_do_not_appear_in_errors_or_reprs():
    with pytest.raises(ConfigurationError) as refused:
        DemoSettings.load(token=b"\xff-hidden")
    assert "hidden" not in str(refused.value)
    settings = DemoSettings.load(token="hidden")
    assert "hidden" not in repr(settings)
    assert secret_value(settings.token) == "hidden"
    assert secret_value(None) is None


VALUES = st.text(max_size=20) | st.integers() | st.floats() | st.lists(st.integers())


@given(st.dictionaries(st.sampled_from(["listen", "lease", "workers"]), VALUES))
def test_no_value_raises_another_error_while_loading(given_values):
    with contextlib.suppress(ConfigurationError):
        DemoSettings.load(**given_values)


def test_variable_that_is_not_a_json_list_is_named(monkeypatch):
    class ListSettings(ShoalSettings):
        model_config = SettingsConfigDict(env_prefix="SHOAL_LIST_")
        hosts: tuple[str, ...] = ()

    monkeypatch.setenv("SHOAL_LIST_HOSTS", "a,b")
    with pytest.raises(ConfigurationError, match=r'"hosts".*SHOAL_LIST_'):
        ListSettings.load()
