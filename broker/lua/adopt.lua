#!lua flags=allow-oom
-- A client that came back takes a sealed batch of its former self over. KEYS: batch, owner | ARGV: incarnation, client
-- {'not-owner'}: another process has this client's name; {'foreign', client}: the batch is that client's
local mine = redis.call('GET', KEYS[2])
if not mine or string.match(mine, '^%S+') ~= ARGV[1] then return { 'not-owner' } end
local h = redis.call('HMGET', KEYS[1], 'state', 'client')
if not h[1] then return { 'gone' } end
if h[2] ~= ARGV[2] then return { 'foreign', h[2] or '?' } end
if h[1] ~= 'sealed' then return { h[1] } end
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
return { 'ok' }
