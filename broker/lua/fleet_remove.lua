#!lua flags=allow-oom
-- The fleet is gone for good: all it owns goes, streams that still hold work excepted. Where another fleet has the run, only what that
-- one does not host. Routes that it has not published stay: batches of the fleet before may be open, and who comes next is held to them.
-- KEYS: fleet, routes, shards, requests, then groups, delayed, parked per shard | ARGV: incarnation, run prefix, version, label …
-- {'ok' | 'lost', shards with work left}
local known = redis.call('GET', KEYS[1])
local mine = not known or string.match(known, '^%S+') == ARGV[1]
local version = redis.call('HGET', KEYS[2], ':version')
local published = mine and (not version or routes_of(version) == routes_of(ARGV[3]))
local left = 0
for i = 5, #KEYS, 3 do
  if published or redis.call('HEXISTS', KEYS[3], string.match(KEYS[i], ':groups:(.+)$')) == 0 then
    -- What waits in a set without its entry in the stream belongs to a batch that is gone.
    if not is_stream(KEYS[i]) or redis.call('XLEN', KEYS[i]) == 0 then redis.call('DEL', KEYS[i], KEYS[i + 1], KEYS[i + 2])
    else left = left + 1 end
  end
end
if not mine then return { 'lost', left } end
redis.call('DEL', KEYS[1], KEYS[4])
if not published then return { 'ok', left } end
for i = 4, #ARGV do redis.call('DEL', ARGV[2] .. 'instance:' .. ARGV[i]) end
redis.call('DEL', KEYS[2], KEYS[3])
return { 'ok', left }
