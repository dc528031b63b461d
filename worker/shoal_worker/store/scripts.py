"""The store's writes as Lua scripts, so that each is one round trip and atomic with the wake-up of those who wait for it.

A store is one Redis hash (its keys are fields), so that one TTL and one DEL cover it whole. KEYS[1] is the hash, or a queue's list.
ARGV[1] is the lifetime in seconds, ARGV[2] the prefix of the channels that waits listen on.
"""

from __future__ import annotations

from typing import Final

# The lifetime is only renewed when half of it is over: a renewal is a write of its own to the append-only file.
_RENEW: Final = """
local function renew()
  if redis.call('TTL', KEYS[1]) < tonumber(ARGV[1]) / 2 then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
end
"""

SET: Final = (
    _RENEW
    + """
for i = 3, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  redis.call('PUBLISH', ARGV[2] .. ARGV[i], '')
end
renew()
"""
)
"""ARGV[3..]: key, value, key, value, ... All of them or none."""

ADD: Final = (
    _RENEW
    + """
local sum = redis.call('HINCRBY', KEYS[1], ARGV[3], ARGV[4])
redis.call('PUBLISH', ARGV[2] .. ARGV[3], '')
renew()
return sum
"""
)
"""ARGV[3] key, ARGV[4] summand. Returns the sum."""

APPEND: Final = (
    _RENEW
    + """
redis.call('HSET', KEYS[1], ARGV[3], (redis.call('HGET', KEYS[1], ARGV[3]) or '') .. ARGV[4])
redis.call('PUBLISH', ARGV[2] .. ARGV[3], '')
renew()
"""
)
"""ARGV[3] key, ARGV[4] what to append."""

COMPARE_SET: Final = (
    _RENEW
    + """
local held = redis.call('HGET', KEYS[1], ARGV[3])
if held == ARGV[4] or (not held and ARGV[4] == '') then
  redis.call('HSET', KEYS[1], ARGV[3], ARGV[5])
  redis.call('PUBLISH', ARGV[2] .. ARGV[3], '')
  renew()
  return ARGV[5]
end
return held or ARGV[4]
"""
)
"""ARGV[3] key, ARGV[4] expected, ARGV[5] desired. Returns what torch's stores return, also for an absent key: the expected value."""

QUEUE_PUSH: Final = (
    _RENEW
    + """
redis.call('RPUSH', KEYS[1], ARGV[4])
redis.call('PUBLISH', ARGV[2] .. ARGV[3], '')
renew()
"""
)
"""ARGV[3] the queue's key, ARGV[4] the item."""
