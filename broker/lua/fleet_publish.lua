#!lua flags=allow-oom
-- The lease, the route map and the shards' records, in one step; other routes only while no batch is open.
-- KEYS: fleet, routes, shards, requests | ARGV: incarnation, holder, lease_ms, ttl_ms, force(0|1), run prefix, version, number of routes, route, shard …, shard, record …
-- {'ok', ''} | {'taken', the holder's words} | {'batches', key of an open batch}
local known = redis.call('GET', KEYS[1])
local mine = known and string.match(known, '^%S+') == ARGV[1]
if known and not mine and ARGV[5] ~= '1' then return { 'taken', known } end

-- Rare, and only a run's few keys share a broker with few others: a scan here closes the gap that a look from outside would leave.
local function open_batch()
  local cursor = '0'
  repeat
    local page = redis.call('SCAN', cursor, 'MATCH', ARGV[6] .. 'batch:*', 'COUNT', 1000)
    cursor = page[1]
    for _, key in ipairs(page[2]) do
      local state = redis.call('HGET', key, 'state')
      if state and state ~= 'closed' then return key end
    end
  until cursor == '0'
end

local version = redis.call('HGET', KEYS[2], ':version')
if version and routes_of(version) ~= routes_of(ARGV[7]) then
  local batch = open_batch()
  if batch then return { 'batches', batch } end
end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. ARGV[2], 'PX', ARGV[3])
-- What was asked of another fleet was not asked of this one.
if not mine then redis.call('DEL', KEYS[4]) end
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('HSET', KEYS[2], ':version', ARGV[7])
local routes_end = 8 + 2 * tonumber(ARGV[8])
for i = 9, #ARGV, 2 do redis.call('HSET', i <= routes_end and KEYS[2] or KEYS[3], ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', KEYS[2], ARGV[4])
redis.call('PEXPIRE', KEYS[3], ARGV[4])
return { 'ok', '' }
