"""Redis (or Valkey): connections, and an embedded server for machines without one."""

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
