#!lua flags=allow-oom
-- One fleet per run. The lease is a string of words: incarnation, then who holds it. KEYS: fleet | ARGV: incarnation, holder, lease_ms
-- {'ok', ''} or {'taken', the other's words}
local known = redis.call('GET', KEYS[1])
if known and string.match(known, '^%S+') ~= ARGV[1] then return { 'taken', known } end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. ARGV[2], 'PX', ARGV[3])
return { 'ok', '' }
