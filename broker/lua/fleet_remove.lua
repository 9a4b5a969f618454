#!lua flags=allow-oom
-- The fleet is gone for good: all it owns goes, streams that still hold work excepted. Where another fleet has the run, only what that
-- one does not host. KEYS: fleet, routes, shards, requests, then groups, delayed, parked per shard | ARGV: incarnation, run prefix, label …
-- {'ok' | 'lost', shards with work left}
local known = redis.call('GET', KEYS[1])
local mine = not known or string.match(known, '^%S+') == ARGV[1]
local left = 0
for i = 5, #KEYS, 3 do
  if mine or redis.call('HEXISTS', KEYS[3], string.match(KEYS[i], ':groups:(.+)$')) == 0 then
    -- What waits in a set without its entry in the stream belongs to a batch that is gone.
    if not is_stream(KEYS[i]) or redis.call('XLEN', KEYS[i]) == 0 then redis.call('DEL', KEYS[i], KEYS[i + 1], KEYS[i + 2])
    else left = left + 1 end
  end
end
if not mine then return { 'lost', left } end
for i = 3, #ARGV do redis.call('DEL', ARGV[2] .. 'instance:' .. ARGV[i]) end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4])
return { 'ok', left }
