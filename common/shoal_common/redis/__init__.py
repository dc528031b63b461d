"""Redis (or Valkey): connections with one clear error, and an embedded server if nobody runs
one."""

from shoal_common.redis.connection import (
    RedisSettings,
    connect,
    connect_async,
    redacted,
    with_authority,
)
from shoal_common.redis.embedded import EmbeddedRedis

__all__ = [
    "EmbeddedRedis",
    "RedisSettings",
    "connect",
    "connect_async",
    "redacted",
    "with_authority",
]
