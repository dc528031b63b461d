"""Settings of clients and servers that are refused."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from shoal_common.errors import ConfigurationError
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.rpc.server import ServerSettings
from shoal_common.security.authentication import TlsSettings, TokenTable
from shoal_coordinator.membership.model.spec import DEFAULT_LEASE_MS

TLS = TlsSettings(certificate=Path("c.pem"), key=Path("k.pem"))
TOKENS = TokenTable({"t": "admin"})


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"address": "127.0.0.1:0"}, "port 0"),
        ({"address": "nowhere"}, "HOST:PORT"),
        ({"attempts": 6}, "attempts=6"),
        ({"attempts": 0}, "attempts=0"),
        ({"deadline": timedelta(0)}, "deadline=0:00:00"),
        ({"keepalive": timedelta(microseconds=1)}, "keepalive="),
        ({"max_message_bytes": 0}, "max_message_bytes=0"),
    ],
)
def test_invalid_channel_settings_are_refused(wrong, named):
    with pytest.raises(ConfigurationError, match=named):
        ChannelSettings(**{"address": "127.0.0.1:7000", **wrong})


def test_a_token_does_not_appear_in_the_settings_repr():
    assert "secret" not in repr(ChannelSettings(address="127.0.0.1:7000", token="secret"))


@pytest.mark.parametrize(
    ("settings", "lacking"),
    [
        ({}, "without TLS or tokens"),
        ({"tokens": TOKENS}, "without TLS;"),
        ({"tls": TLS}, "without tokens;"),
    ],
)
def test_server_reachable_by_others_requires_tls_and_tokens_or_explicit_consent(settings, lacking):
    with pytest.raises(ConfigurationError, match=lacking):
        ServerSettings(listen="0.0.0.0:0", **settings)
    assert ServerSettings(listen="0.0.0.0:0", insecure=True, **settings)
    assert ServerSettings(listen="127.0.0.1:0", **settings)
    assert ServerSettings(listen="0.0.0.0:0", tls=TLS, tokens=TOKENS)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"tls": TlsSettings(authority=Path("ca.pem"))}, "needs a certificate"),
        ({"drain_timeout": timedelta(seconds=-1)}, "drain_timeout"),
        ({"max_message_bytes": 0}, "max_message_bytes=0"),
        ({"listen": "7000"}, "HOST:PORT"),
    ],
)
def test_invalid_server_settings_are_refused(wrong, named):
    with pytest.raises(ConfigurationError, match=named):
        ServerSettings(**{"listen": "127.0.0.1:0", **wrong})


def test_dead_connection_is_detected_well_before_a_lease_ends():
    settings = ChannelSettings(address="coordinator:7000")
    lease = timedelta(milliseconds=DEFAULT_LEASE_MS)
    assert settings.keepalive + settings.keepalive_timeout <= 0.7 * lease
