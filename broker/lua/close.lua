#!lua flags=allow-oom
-- The batch is over, finished or not: its keys go, its queued groups are dropped, the books are returned.
-- KEYS: batch, accepted, then groups, delayed, parked per shard | ARGV: incarnation, batch, then 'shard place:entry id' …
-- {'ok' | 'gone' | 'not-owner', published, completed, failed, cancelled, name, value, …}
local h = redis.call('HMGET', KEYS[1], 'state', 'owner', 'published', 'completed', 'failed', 'cancelled')
if not h[1] then return { 'gone' } end
if h[2] ~= ARGV[1] then return { 'not-owner' } end
local shards, ids = {}, {}
for i = 3, #KEYS, 3 do shards[#shards + 1] = { groups = KEYS[i], delayed = KEYS[i + 1], parked = KEYS[i + 2] } end
for i = 3, #ARGV do
  local place, id = string.match(ARGV[i], '^(%d+):(%S+)$')
  place = tonumber(place)
  ids[place] = ids[place] or {}
  table.insert(ids[place], id)
end
-- An operator who cancelled has counted the unfinished groups, but did not know the entries of those that nobody had taken.
local unfinished, cancelled = purge(KEYS[1], ARGV[2], shards, ids), tonumber(h[6])
if h[1] ~= 'closed' then cancelled = cancelled + unfinished end
local counters = redis.call('HMGET', KEYS[1], 'duplicate_rows', 'stale_writes', 'redeliveries', 'retries', 'dead_groups')
redis.call('DEL', KEYS[1], KEYS[2])
return { 'ok', tonumber(h[3]), tonumber(h[4]), tonumber(h[5]), cancelled, tonumber(counters[1] or 0), tonumber(counters[2] or 0),
  tonumber(counters[3] or 0), tonumber(counters[4] or 0), tonumber(counters[5] or 0) }
