#!lua
-- Creates a batch and the streams it needs, so that no later step has to create one.
-- KEYS: batch, owner, then groups and results of each shard | ARGV: incarnation, client, ttl_ms, groups, rows, group_size, max_unread_bytes, shards,
--   layout (which group goes where, for a client that resumes, and for whoever ends the batch)
local mine = redis.call('GET', KEYS[2])
if not mine or string.match(mine, '^%S+') ~= ARGV[1] then return { 'not-owner', mine or '' } end
for i = 3, #KEYS, 2 do
  if redis.call('EXISTS', KEYS[i]) == 0 then redis.call('XGROUP', 'CREATE', KEYS[i], WORKERS, '0', 'MKSTREAM') end
  if redis.call('EXISTS', KEYS[i + 1]) == 0 then make_stream(KEYS[i + 1]) end
  redis.call('PEXPIRE', KEYS[i], ARGV[3])
  redis.call('PEXPIRE', KEYS[i + 1], ARGV[3])
end
local state = redis.call('HGET', KEYS[1], 'state')
if state then return { state == 'closed' and 'closed' or 'repeated', '' } end
local t = redis.call('TIME')
redis.call('HSET', KEYS[1], 'state', 'open', 'client', ARGV[2], 'owner', ARGV[1], 'groups', ARGV[4], 'rows', ARGV[5],
  'group_size', ARGV[6], 'max_unread_bytes', ARGV[7], 'shards', ARGV[8], 'layout', ARGV[9], 'opened', t[1],
  'rank', string.format('%s%06d', t[1], tonumber(t[2])), 'published', 0, 'completed', 0, 'failed', 0, 'cancelled', 0)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return { 'ok', '' }
