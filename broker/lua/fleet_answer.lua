#!lua flags=allow-oom
-- The fleet's word on a request that stands. Whoever asked for what a later one stands in place of has been told so, and reads no more; nor
-- does who has read an answer that is repeated.
-- KEYS: requests | ARGV: subject, id, answer, ttl_ms
local wanted = redis.call('HGET', KEYS[1], 'want:' .. ARGV[1])
if not wanted or string.match(wanted, '^%S+') ~= ARGV[2] then return 1 end
redis.call('HDEL', KEYS[1], 'want:' .. ARGV[1])
redis.call('HSET', KEYS[1], 'answer:' .. ARGV[2], ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1
