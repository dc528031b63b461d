"""Errors on connecting to Redis are clear and contain no password."""

from __future__ import annotations

import asyncio
import socket
from datetime import timedelta

import pytest
import redis
from shoal_common.errors import (
    AuthenticationError,
    ConfigurationError,
    ShoalError,
    UnavailableError,
)
from shoal_common.redis import EmbeddedRedis, RedisSettings, connect, connect_async, redacted


def connect_async_and_close(url, **more):
    async def run():
        client = await connect_async(url, **more)
        try:
            return await client.get("key")
        finally:
            await client.aclose()

    return asyncio.run(run())


def connect_and_close(url, **more):
    with connect(url, **more) as client:
        return client.get("key")


BOTH = pytest.mark.parametrize(
    "connecting", [connect_and_close, connect_async_and_close], ids=["sync", "async"]
)


@BOTH
def test_clients_return_bytes(redis_url, connecting):
    with redis.Redis.from_url(redis_url) as client:
        client.set("key", b"\x00\xff")
    assert connecting(redis_url) == b"\x00\xff"
    assert connecting(RedisSettings(url=redis_url, command_timeout=None)) == b"\x00\xff"


@BOTH
def test_absent_server_is_unavailable_and_its_password_is_not_reported(connecting):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(
            UnavailableError,
            match=rf"redis://user:\*\*\*@127\.0\.0\.1:{port} is not responding.*embedded",
        ) as raised:
            connecting(RedisSettings(url=f"redis://user:hunter2@127.0.0.1:{port}", retries=0))
    assert "hunter2" not in str(raised.value)
    assert raised.value.reason == "REDIS_UNAVAILABLE"


@BOTH
def test_silent_server_is_unavailable_after_the_timeout(connecting):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        settings = RedisSettings(
            url=url,
            connect_timeout=timedelta(milliseconds=200),
            command_timeout=timedelta(milliseconds=200),
            retries=0,
        )
        with pytest.raises(UnavailableError, match="is not responding"):
            connecting(settings)


@BOTH
@pytest.mark.parametrize("credentials", ["", "default:wrong@", ":wrong@"])
def test_refused_credentials_are_an_authentication_error(connecting, credentials):
    with EmbeddedRedis() as server:
        with redis.Redis.from_url(server.url) as admin:
            admin.config_set("requirepass", "right")
        with pytest.raises(AuthenticationError) as raised:
            connecting(f"redis://{credentials}127.0.0.1:{server.port}")
        assert raised.value.reason == "REDIS_CREDENTIALS"
        assert "wrong" not in str(raised.value).replace("wrong number", "").replace(
            "wrong pass", ""
        )
        assert connecting(f"redis://:right@127.0.0.1:{server.port}") is None


@BOTH
@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1",
        "127.0.0.1:6379",
        "",
        "redis://127.0.0.1:notaport",
        "redis://127.0.0.1:99999999",
    ],
)
def test_invalid_urls_are_configuration_errors(connecting, url):
    with pytest.raises(ConfigurationError, match="redis://HOST:PORT"):
        connecting(url)


def test_an_embedded_url_is_explained():
    with pytest.raises(ConfigurationError, match=r"EmbeddedRedis\.from_url"):
        connect("embedded://")


def test_timeouts_are_configured_once():
    with pytest.raises(ConfigurationError, match="along with RedisSettings"):
        connect(RedisSettings(url="redis://127.0.0.1:1"), command_timeout=timedelta(seconds=1))
    with pytest.raises(ConfigurationError, match="retries=-1"):
        RedisSettings(url="redis://127.0.0.1:1", retries=-1)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://user:p@ss@host:1", "redis://user:***@host:1"),
        ("rediss://:p@host", "rediss://:***@host"),
    ],
)
def test_passwords_are_redacted(url, shown):
    assert redacted(url) == shown


@BOTH
def test_no_text_as_a_url_raises_another_error(connecting):
    for text in (
        "redis://[::1",
        "redis://a b:1",
        "\x00",
        "redis://",
        "unix://",
        "rediss://%zz@h:x",
    ):
        with pytest.raises(ShoalError):
            connecting(
                RedisSettings(url=text, retries=0, connect_timeout=timedelta(milliseconds=200))
            )
