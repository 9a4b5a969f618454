#!lua flags=allow-oom
-- Makes a client's result streams again that somebody deleted. KEYS: owner, then results … | ARGV: incarnation, ttl_ms
-- {'not-owner'} or {'ok', places among the results of those that were made …}
local value = redis.call('GET', KEYS[1])
if not value or string.match(value, '^%S+') ~= ARGV[1] then return { 'not-owner' } end
local out = { 'ok' }
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then
    make_stream(KEYS[i])
    redis.call('PEXPIRE', KEYS[i], ARGV[2])
    out[#out + 1] = i - 2
  end
end
return out
