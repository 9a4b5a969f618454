#!lua flags=allow-oom
-- A client leaves: its name is free and its result streams go. KEYS: owner, then results … | ARGV: incarnation
local value = redis.call('GET', KEYS[1])
if not value or string.match(value, '^%S+') ~= ARGV[1] then return { 'not-owner' } end
redis.call('DEL', unpack(KEYS))
return { 'ok' }
