#!lua flags=allow-oom
-- A client's result stream was deleted by somebody: what was unread on it is gone, how much is not known, and its batches must not wait for it. All
-- that is unread of them counts from here on, so for a while they may have more than their bound.
-- KEYS: owner, then batches … | ARGV: incarnation
-- {'ok' | 'not-owner'}
local value = redis.call('GET', KEYS[1])
if not value or string.match(value, '^%S+') ~= ARGV[1] then return { 'not-owner' } end
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then redis.call('HSET', KEYS[i], 'unread_bytes', 0) end
end
return { 'ok' }
