#!lua flags=allow-oom
-- What is unread of a batch stands on its client's result streams. Where these are empty nothing is, whatever was counted: somebody may have deleted
-- a stream, and the batch must not wait for room that nobody can give back.
-- KEYS: batch, then results of its shards | ARGV: incarnation
-- {'ok' | 'unread' | 'not-owner'}
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return { 'not-owner' } end
for i = 2, #KEYS do
  -- A role of an earlier `acl` may not ask.
  if redis.pcall('XLEN', KEYS[i]) ~= 0 then return { 'unread' } end
end
redis.call('HSET', KEYS[1], 'unread_bytes', 0)
return { 'ok' }
