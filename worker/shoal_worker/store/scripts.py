"""Lua scripts for the store's writes. Each write takes one round trip, and atomically wakes the
waits for its keys.

A store is one Redis hash with the store's keys as fields, so a single TTL or DEL covers all of
them. KEYS[1] is the hash, or a queue's list. ARGV[1] is the lifetime in seconds, ARGV[2] the prefix
of the channels that waits listen to.
"""

from __future__ import annotations

from typing import Final

# The lifetime is renewed only after half of it has passed, because a renewal is a separate write to
# the append-only file.
_RENEW: Final = """
local function renew()
  if redis.call('TTL', KEYS[1]) < tonumber(ARGV[1]) / 2 then
    redis.call('EXPIRE', KEYS[1], ARGV[1])
  end
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
"""Sets several keys atomically. ARGV[3..]: key, value, key, value, ..."""

ADD: Final = (
    _RENEW
    + """
local sum = redis.call('HINCRBY', KEYS[1], ARGV[3], ARGV[4])
redis.call('PUBLISH', ARGV[2] .. ARGV[3], '')
renew()
return sum
"""
)
"""Adds to a number and returns the sum. ARGV[3]: key; ARGV[4]: summand."""

APPEND: Final = (
    _RENEW
    + """
redis.call('HSET', KEYS[1], ARGV[3], (redis.call('HGET', KEYS[1], ARGV[3]) or '') .. ARGV[4])
redis.call('PUBLISH', ARGV[2] .. ARGV[3], '')
renew()
"""
)
"""Appends to a value. ARGV[3]: key; ARGV[4]: bytes to append."""

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
"""Sets a key if it has the expected value. ARGV[3]: key; ARGV[4]: expected value; ARGV[5]: desired
value. Returns the same value as torch's stores: for an absent key, the expected value."""

QUEUE_PUSH: Final = (
    _RENEW
    + """
redis.call('RPUSH', KEYS[1], ARGV[4])
redis.call('PUBLISH', ARGV[2] .. ARGV[3], '')
renew()
"""
)
"""Appends an item to a queue. ARGV[3]: the queue's key; ARGV[4]: item."""

ARRIVE: Final = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local size, rank, token, patience = tonumber(ARGV[3]), ARGV[4], ARGV[5], tonumber(ARGV[6])

local function holder(of)
  local entry = redis.call('HGET', KEYS[1], 'rank:' .. of)
  if not entry then return nil end
  local held, at = entry:match('^(%S+) (%S+)$')
  return held, now - tonumber(at) < patience
end

local function absent()
  local names = {}
  for other = 0, size - 1 do
    local held, alive = holder(other)
    if not (held and alive) then table.insert(names, 'rank ' .. other) end
  end
  return names
end

local function begin()
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'name', ARGV[7], 'size', size)
  redis.call('EXPIRE', KEYS[1], ARGV[8])
end

local name = redis.call('HGET', KEYS[1], 'name')
local held, alive = holder(rank)
if name and redis.call('HEXISTS', KEYS[1], 'complete') == 1 then
  if held == token then return {name} end
  begin()
elseif not name then
  begin()
elseif tonumber(redis.call('HGET', KEYS[1], 'size')) ~= size then
  for other = 0, tonumber(redis.call('HGET', KEYS[1], 'size')) - 1 do
    local _, there = holder(other)
    if there then
      return {name, 'the end of a round of ' .. redis.call('HGET', KEYS[1], 'size') .. ' ranks'}
    end
  end
  begin()
elseif held and held ~= token and alive then
  return {name, 'another process that has rank ' .. rank .. ' too'}
end

redis.call('HSET', KEYS[1], 'rank:' .. rank, token .. ' ' .. now)
local missing = absent()
if #missing == 0 then
  redis.call('HSET', KEYS[1], 'complete', 1)
  redis.call('PUBLISH', ARGV[2] .. 'round', '')
end
return {redis.call('HGET', KEYS[1], 'name'), unpack(missing)}
"""
"""Registers a rank's arrival at a rendezvous. While the rank waits, it must repeat the call every
second, so that dead ranks are not counted.

KEYS[1]: the round, with the fields name, size, complete, and for each rank `rank:N` (token and time
of the last refresh). ARGV[3]: world size; [4]: rank; [5]: this process's token; [6]: milliseconds
without a refresh after which a rank is dead; [7]: name for a new round; [8]: lifetime in s. Returns
the round's name and the absent ranks; none are absent if the round is complete. A rank that arrives
at a complete round without being part of it begins a new round.
"""
