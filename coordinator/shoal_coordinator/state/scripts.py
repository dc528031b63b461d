"""Lua scripts that write a job's state. Each script is atomic and checks the writer's epoch.

Fencing: when a coordinator starts, it takes a number (its epoch) from a common counter. A job
stores the epoch of the coordinator that last claimed it, and refuses writes with a lower epoch.
Within an epoch, the revision counts the commits, so that a commit is applied only once and only to
the state that it is based on. In addition to the fields of codec.py, the job's hash contains
`epoch`, `revision` and `commit` (the id of the last commit).
"""

from __future__ import annotations

from typing import Final

CLAIM: Final = """
-- KEYS: state. ARGV: epoch.
-- Answers {'ABSENT'}, {'FENCED', epoch of the newer one} or {'OK', {field, value, ...}}.
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch then
  return {'ABSENT'}
end
if tonumber(epoch) > tonumber(ARGV[1]) then
  return {'FENCED', epoch}
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
return {'OK', redis.call('HGETALL', KEYS[1])}
"""

COMMIT: Final = """
-- KEYS: state, events. ARGV: epoch, revision that the change is based on (0: the job is new),
-- commit id, longest event log, number of fields to set, of fields to delete, of events,
-- milliseconds after which the job is forgotten (0: never); then field, value, ...; field, ...;
-- kind, generation, member id, attributes, run, ...
-- Answers {'OK', seconds, microseconds} (Redis time), {'FENCED', epoch of the newer one},
-- {'BEHIND', revision} if what the change is based on is not here, or {'AHEAD', revision} if
-- something else was written since.
local stored = redis.call('HMGET', KEYS[1], 'epoch', 'revision', 'commit')
local epoch, revision = tonumber(stored[1] or '0'), tonumber(stored[2] or '0')
local based_on = tonumber(ARGV[2])
if epoch > tonumber(ARGV[1]) then
  return {'FENCED', stored[1]}
end
local time = redis.call('TIME')
if revision == based_on + 1 and stored[3] == ARGV[3] then
  return {'OK', time[1], time[2]}  -- Sent again: the first answer was lost.
end
if revision < based_on then
  return {'BEHIND', stored[2] or '0'}
end
if revision > based_on then
  return {'AHEAD', stored[2]}
end
local at = 9
for _ = 1, tonumber(ARGV[5]) do
  redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1])
  at = at + 2
end
for _ = 1, tonumber(ARGV[6]) do
  redis.call('HDEL', KEYS[1], ARGV[at])
  at = at + 1
end
for _ = 1, tonumber(ARGV[7]) do
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*',
    'kind', ARGV[at], 'generation', ARGV[at + 1], 'member_id', ARGV[at + 2],
    'attributes', ARGV[at + 3], 'run', ARGV[at + 4])
  at = at + 5
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'revision', tostring(based_on + 1), 'commit', ARGV[3])
for _, key in ipairs(KEYS) do
  if tonumber(ARGV[8]) > 0 then
    redis.call('PEXPIRE', key, ARGV[8])
  else
    redis.call('PERSIST', key)
  end
end
return {'OK', time[1], time[2]}
"""

REWRITE: Final = """
-- KEYS: state. ARGV: epoch, revision, then field, value, ...
-- Writes a whole job again that this Redis has lost, or lost the last writes of. Answers {'OK'} or
-- {'FENCED', epoch of the newer one}.
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if epoch and tonumber(epoch) > tonumber(ARGV[1]) then
  return {'FENCED', epoch}
end
redis.call('DEL', KEYS[1])
for at = 3, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1])
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'revision', ARGV[2], 'commit', '')
return {'OK'}
"""
