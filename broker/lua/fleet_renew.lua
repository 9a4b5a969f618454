#!lua flags=allow-oom
-- The fleet's sign of life: its lease, and the lives of all keys that it owns. Also what was asked of it.
-- KEYS: fleet, routes, shards, requests, then groups, delayed, parked per shard | ARGV: incarnation, holder, lease_ms, ttl_ms, version
-- {'ok' | 'lost' | 'gone' (publish again), the other's words, field, request …}
local known = redis.call('GET', KEYS[1])
if known and string.match(known, '^%S+') ~= ARGV[1] then return { 'lost', known } end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. ARGV[2], 'PX', ARGV[3])
for i = 2, #KEYS do redis.call('PEXPIRE', KEYS[i], ARGV[4]) end
local whole = redis.call('HGET', KEYS[2], ':version') == ARGV[5] and redis.call('EXISTS', KEYS[3]) == 1
local out = { whole and 'ok' or 'gone', '' }
for _, word in ipairs(redis.call('HGETALL', KEYS[4])) do out[#out + 1] = word end
return out
