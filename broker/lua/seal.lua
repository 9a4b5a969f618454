#!lua flags=allow-oom
-- All groups are published; nothing more may come. KEYS: batch | ARGV: incarnation, checksums of the groups' rows or ''
local h = redis.call('HMGET', KEYS[1], 'state', 'owner', 'groups', 'published')
if not h[1] or h[1] == 'closed' then return { 'closed', 0 } end
if h[2] ~= ARGV[1] then return { 'not-owner', 0 } end
if h[3] ~= h[4] then return { 'unfinished', tonumber(h[4]) } end
redis.call('HSET', KEYS[1], 'state', 'sealed', 'checksums', ARGV[2])
return { 'ok', tonumber(h[4]) }
