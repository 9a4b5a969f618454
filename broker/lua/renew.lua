#!lua flags=allow-oom
-- An instance's sign of life and the renewal of all it holds, in one step.
-- KEYS: groups, instance, shards, then the batches | ARGV: consumer, incarnation, instance_ttl_ms, key_ttl_ms, lease_ms, abandon_ms, observing(0|1), run prefix,
--   host, pid, running, slots, shard, then per group: batch's place among KEYS, entry, group, token
-- {'ok' | 'replaced', one of ok|lost|gone per group …}
local known = redis.call('HGET', KEYS[2], 'incarnation')
if known and known ~= ARGV[2] then return { 'replaced' } end
redis.call('HSET', KEYS[2], 'incarnation', ARGV[2], 'consumer', ARGV[1], 'host', ARGV[9], 'pid', ARGV[10], 'running', ARGV[11],
  'slots', ARGV[12], 'shard', ARGV[13])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
local now, out = now_ms(), { 'ok' }
for i = 14, #ARGV, 4 do
  local batch = KEYS[tonumber(ARGV[i])]
  local h = redis.call('HMGET', batch, 'state', 'client', 'g:' .. ARGV[i + 2])
  local r, answer = parse(h[3]), 'ok'
  if not h[1] or h[1] == 'closed' then answer = 'gone'
  elseif not r or r.token ~= ARGV[i + 3] or r.status ~= 'running' then answer = 'lost'
  else
    local absent = owner_absence(ARGV[8] .. 'owner:' .. h[2], tonumber(ARGV[5]), now)
    if absent and absent > tonumber(ARGV[6]) and ARGV[7] == '1' then
      redis.call('HDEL', batch, 'g:' .. ARGV[i + 2])
      redis.call('HINCRBY', batch, 'cancelled', 1)
      answer = 'gone'
    end
  end
  if answer == 'ok' then redis.call('XCLAIM', KEYS[1], WORKERS, ARGV[1], 0, ARGV[i + 1], 'JUSTID')
  elseif answer == 'gone' then drop_entry(KEYS[1], ARGV[i + 1]) end
  out[#out + 1] = answer
end
return out
