"""Connections to a running Redis server (or a compatible one, such as Valkey).

`connect` and `connect_async` return once the server has responded to a PING. Otherwise they raise
one ShoalError with the server's address (without its password) and the remedy. Replies are bytes,
because Shoal stores protobuf in Redis. This module does not start servers (embedded.py does) and
defines no keys. redis-py's synchronous clients are thread-safe; an asynchronous client belongs to
the loop that created it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlencode, urlsplit, urlunsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from shoal_common.errors import (
    AuthenticationError,
    ConfigurationError,
    ShoalError,
    UnavailableError,
)

EMBEDDED_SCHEME: Final = "embedded"
_SCHEMES: Final = ("redis", "rediss", "unix")


@dataclass(frozen=True, kw_only=True)
class RedisSettings:
    """Address of a Redis server, and timeouts."""

    url: str
    """redis://[user:password@]host:port[/db], rediss:// (TLS) or unix:///path."""

    connect_timeout: timedelta = timedelta(seconds=5)
    """Maximum wait for the TCP connection and for the first response."""

    command_timeout: timedelta | None = timedelta(seconds=10)
    """Maximum wait for the response to a command. None: for clients whose commands (XREAD BLOCK,
    BLPOP) block without limit."""

    retries: int = 3
    """Number of retries of a command if its connection breaks. Commands must be idempotent, or this
    must be 0."""

    def __post_init__(self) -> None:
        scheme = _split(self.url).scheme
        if scheme == EMBEDDED_SCHEME:
            raise ConfigurationError(
                f"{self.url!r} is not the URL of a running server; start one with "
                "EmbeddedRedis.from_url() and use its .url"
            )
        if scheme not in _SCHEMES:
            raise ConfigurationError(
                f"Redis URL {redacted(self.url)!r}: expected redis://HOST:PORT, rediss://HOST:PORT "
                "or unix:///PATH"
            )
        if self.retries < 0:
            raise ConfigurationError(f"retries={self.retries}: expected 0 or more")


def connect(
    url: str | RedisSettings,
    *,
    connect_timeout: timedelta | None = None,
    command_timeout: timedelta | None = None,
) -> redis.Redis:
    """Returns a synchronous Redis client once the server has responded.

    Raises ConfigurationError (invalid URL), AuthenticationError (credentials rejected),
    UnavailableError (no response).
    """
    settings = _settings(url, connect_timeout, command_timeout)
    backoff = ExponentialWithJitterBackoff(base=0.05, cap=1.0)
    client: redis.Redis = _from_url(redis.Redis, settings, Retry(backoff, settings.retries))
    try:
        client.ping()
    except (redis.RedisError, OSError) as error:
        client.close()
        raise _refused(settings, error) from error
    return client


async def connect_async(
    url: str | RedisSettings,
    *,
    connect_timeout: timedelta | None = None,
    command_timeout: timedelta | None = None,
) -> redis.asyncio.Redis:
    """Returns an asyncio Redis client once the server has responded. Close it with `await
    client.aclose()`."""
    settings = _settings(url, connect_timeout, command_timeout)
    backoff = ExponentialWithJitterBackoff(base=0.05, cap=1.0)
    client: redis.asyncio.Redis = _from_url(
        redis.asyncio.Redis, settings, AsyncRetry(backoff, settings.retries)
    )
    try:
        await client.ping()
    except (redis.RedisError, OSError) as error:
        await client.aclose()
        raise _refused(settings, error) from error
    return client


def with_authority(url: str, authority: Path | None) -> str:
    """Returns a rediss:// URL with the file `authority` added, whose certificates then verify the
    server. Other URLs, and URLs that already name such a file, are returned unchanged. `authority`:
    file of CA certificates; None: the URL is returned unchanged."""
    parts = _split(url)
    if authority is None or parts.scheme != "rediss" or "ssl_ca_certs=" in parts.query:
        return url
    query = "&".join(filter(None, (parts.query, urlencode({"ssl_ca_certs": str(authority)}))))
    return urlunsplit(parts._replace(query=query))


def redacted(url: str) -> str:
    """Returns a Redis URL without its password, for use in messages and logs."""
    parts = _split(url)
    if "@" not in parts.netloc:
        return url
    credentials, _, host = parts.netloc.rpartition("@")
    user = credentials.partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{user}:***@{host}"))


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        # The message omits the URL, since it may contain an unrecognized password.
        raise ConfigurationError(
            f"cannot parse the Redis URL: {error}; expected redis://HOST:PORT"
        ) from error


def _settings(
    url: str | RedisSettings, connect_timeout: timedelta | None, command_timeout: timedelta | None
) -> RedisSettings:
    if isinstance(url, RedisSettings):
        if connect_timeout is not None or command_timeout is not None:
            raise ConfigurationError(
                "timeouts were passed along with RedisSettings; set them in RedisSettings, or pass "
                "a URL"
            )
        return url
    given: Mapping[str, Any] = {
        "connect_timeout": connect_timeout,
        "command_timeout": command_timeout,
    }
    return RedisSettings(
        url=url, **{name: value for name, value in given.items() if value is not None}
    )


def _from_url(kind: Any, settings: RedisSettings, retry: Any) -> Any:
    command_timeout = settings.command_timeout
    try:
        return kind.from_url(
            settings.url,
            socket_connect_timeout=settings.connect_timeout.total_seconds(),
            socket_timeout=None if command_timeout is None else command_timeout.total_seconds(),
            retry=retry,
            health_check_interval=30,
        )
    except ValueError as error:
        raise ConfigurationError(
            f"Redis URL {redacted(settings.url)!r}: {error}; expected redis://HOST:PORT"
        ) from error


def _refused(settings: RedisSettings, error: Exception) -> ShoalError:
    where = redacted(settings.url)
    if isinstance(
        error, redis.AuthenticationError | redis.exceptions.NoPermissionError
    ) or "NOAUTH" in str(error):
        return AuthenticationError(
            f"Redis at {where} rejected the credentials: {error}; put valid ones in the URL, "
            "redis://USER:PASSWORD@HOST:PORT",
            reason="REDIS_CREDENTIALS",
        )
    return UnavailableError(
        f"Redis at {where} is not responding: {error or type(error).__name__}; start a server "
        "there, or use embedded://",
        reason="REDIS_UNAVAILABLE",
    )
