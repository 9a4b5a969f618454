#!lua flags=allow-oom
-- An operator ends a batch of somebody else: work stops now, and its client is told through its result stream.
-- KEYS: batch, then groups, delayed, parked, results per shard | ARGV: batch, reason
local h = redis.call('HMGET', KEYS[1], 'state', 'cancelled')
if not h[1] then return { 'gone', 0 } end
if h[1] == 'closed' then return { 'repeated', 0 } end
local shards, told = {}, false
for i = 2, #KEYS, 4 do shards[#shards + 1] = { groups = KEYS[i], delayed = KEYS[i + 1], parked = KEYS[i + 2] } end
local unfinished = purge(KEYS[1], ARGV[1], shards, {})
redis.call('HSET', KEYS[1], 'state', 'closed', 'reason', ARGV[2])
redis.call('HINCRBY', KEYS[1], 'cancelled', unfinished)
for i = 5, #KEYS, 4 do
  if not told and is_stream(KEYS[i]) then
    redis.call('XADD', KEYS[i], '*', 'kind', 'cancelled', 'batch', ARGV[1], 'reason', ARGV[2])
    told = true
  end
end
return { 'ok', unfinished }
