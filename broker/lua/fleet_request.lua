#!lua flags=allow-oom
-- Asks the fleet for something: the wanted state of `subject`, replacing an older wish. KEYS: fleet, requests | ARGV: subject, id, request, ttl_ms
-- {'ok' | 'no-fleet'}
if redis.call('EXISTS', KEYS[1]) == 0 then return { 'no-fleet' } end
local older = redis.call('HGET', KEYS[2], 'want:' .. ARGV[1])
if older then
  local id = string.match(older, '^%S+')
  if id ~= ARGV[2] then redis.call('HSET', KEYS[2], 'answer:' .. id, 'superseded by a later request') end
end
redis.call('HSET', KEYS[2], 'want:' .. ARGV[1], ARGV[2] .. ' ' .. ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return { 'ok' }
