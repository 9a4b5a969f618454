#!lua flags=allow-oom
-- An instance's sign of life and the renewal of all it holds, in one step.
-- KEYS: groups, instance, delayed, parked, events, then the batches
-- ARGV: consumer, incarnation, instance_ttl_ms, key_ttl_ms, lease_ms, abandon_ms, observing(0|1), run prefix, host,
--   pid, running, slots, shard, replacing(0|1: whoever had the label before has lost it), then per group: batch's place among KEYS, entry, group, token
-- {'ok' | 'replaced', one of ok|lost|gone per group …}
local known = redis.call('HGET', KEYS[2], 'incarnation')
if known and known ~= ARGV[2] and ARGV[14] == '0' then return { 'replaced' } end
redis.call('HSET', KEYS[2], 'incarnation', ARGV[2], 'consumer', ARGV[1], 'host', ARGV[9], 'pid', ARGV[10], 'running', ARGV[11],
  'slots', ARGV[12], 'shard', ARGV[13])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
for _, key in ipairs({ KEYS[1], KEYS[3], KEYS[4] }) do redis.call('PEXPIRE', key, ARGV[4]) end
local now, out = now_ms(), { 'ok' }
for i = 15, #ARGV, 4 do
  local batch = KEYS[tonumber(ARGV[i])]
  local h = redis.call('HMGET', batch, 'state', 'client', 'g:' .. ARGV[i + 2], 'owner')
  local r, answer = parse(h[3]), 'ok'
  if not h[1] or h[1] == 'closed' then answer = 'gone'
  elseif not r or r.token ~= ARGV[i + 3] then
    answer = 'lost'
    count_stale(batch, KEYS[5], string.match(batch, ':batch:(.+)$'), ARGV[i + 2], r, string.match(KEYS[2], ':instance:(.+)$'), 'renewal')
  elseif r.status == 'done' or r.status == 'handed' then answer = 'ended'  -- the environment may still be tidying up
  elseif r.status ~= 'running' then answer = 'lost'  -- no intruder: the attempt has just ended, with the renewal under way
  else
    local absent = owner_absence(batch, h[4], ARGV[8] .. 'owner:' .. h[2], tonumber(ARGV[5]), now)
    if absent and absent > tonumber(ARGV[6]) and ARGV[7] == '1' then
      abandon(batch, KEYS[5], string.match(batch, ':batch:(.+)$'), ARGV[i + 2], r, r.instance)
      answer = 'gone'
    end
  end
  if answer == 'ok' then
    local claimed = redis.pcall('XCLAIM', KEYS[1], WORKERS, ARGV[1], 0, ARGV[i + 1], 'JUSTID')
    -- Somebody deleted the stream. The attempt may still finish, and all others are to be looked at.
    local refused = claimed.err and tostring(claimed.err)
    if refused and not string.find(refused, 'NOGROUP', 1, true) then return redis.error_reply(refused) end
  elseif answer == 'gone' then drop_entry(KEYS[1], ARGV[i + 1]) end
  out[#out + 1] = answer == 'ended' and 'ok' or answer
end
return out
