#!lua flags=allow-oom
-- An instance leaves for good; a consumer that still holds entries stays, or they could never be reached.
-- KEYS: groups, instance | ARGV: consumer, incarnation
if redis.call('HGET', KEYS[2], 'incarnation') == ARGV[2] then redis.call('DEL', KEYS[2]) end
if is_stream(KEYS[1]) and #redis.call('XPENDING', KEYS[1], WORKERS, '-', '+', 1, ARGV[1]) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], WORKERS, ARGV[1])
end
return 1
