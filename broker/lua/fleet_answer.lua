#!lua flags=allow-oom
-- The fleet's word on a request, which stays wanted only if a later one stands in its place. KEYS: requests | ARGV: subject, id, answer, ttl_ms
local wanted = redis.call('HGET', KEYS[1], 'want:' .. ARGV[1])
if wanted and string.match(wanted, '^%S+') == ARGV[2] then redis.call('HDEL', KEYS[1], 'want:' .. ARGV[1]) end
redis.call('HSET', KEYS[1], 'answer:' .. ARGV[2], ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1
