#!lua flags=allow-oom
-- The shard's stream and its consumer group, from the stream's beginning: entries from before count too. KEYS: groups | ARGV: ttl_ms
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], WORKERS, '0', 'MKSTREAM')
if made.err and not string.find(tostring(made.err), 'BUSYGROUP', 1, true) then return made end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return { 'ok' }
