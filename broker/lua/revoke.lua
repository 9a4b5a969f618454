#!lua flags=allow-oom
-- The fleet knows that this consumer's process is dead: what it held may be taken over now. KEYS: groups | ARGV: consumer, idle_ms
if not is_stream(KEYS[1]) then return 0 end
local held = redis.call('XPENDING', KEYS[1], WORKERS, '-', '+', 1000, ARGV[1])
for _, p in ipairs(held) do redis.call('XCLAIM', KEYS[1], WORKERS, ARGV[1], 0, p[1], 'IDLE', ARGV[2], 'JUSTID') end
return #held
