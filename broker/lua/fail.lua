#!lua flags=allow-oom
-- An attempt failed: the group waits for a retry in `delayed`, or is buried once its class has used its attempts up.
-- KEYS: batch, groups, delayed, results, dead, events
-- ARGV: batch, group, route, first_row, rows, token, instance, class(infra|data), limit, delay_ms, failure, reason, max_dead_bytes
-- {'retry' | 'dead' | 'stale' | 'gone'}
local batch, group = ARGV[1], ARGV[2]
local h = redis.call('HMGET', KEYS[1], 'state', 'g:' .. group)
if not h[1] or h[1] == 'closed' then return { 'gone' } end
local r = parse(h[2])
if not r or r.token ~= ARGV[6] or r.status ~= 'running' then
  if r and r.token == ARGV[6] and r.status == 'failed' then return { 'dead' } end
  if r and r.token == ARGV[6] and is_delayed(r) then return { 'retry' } end
  count_stale(KEYS[1], KEYS[6], batch, group, r, ARGV[7], 'fail')
  return { 'stale' }
end
r[ARGV[8]] = r[ARGV[8]] + 1
if r[ARGV[8]] >= tonumber(ARGV[9]) then
  redis.call('HINCRBY', KEYS[1], 'dead_groups', 1)
  bury({ batch = KEYS[1], groups = KEYS[2], results = KEYS[4], dead = KEYS[5], events = KEYS[6] },
    { batch = batch, group = group, route = ARGV[3], rows = ARGV[5], first_row = ARGV[4], reason = ARGV[12], failure = ARGV[11] }, r, ARGV[13])
  return { 'dead' }
end
local failed_on = {}
for label in string.gmatch(redis.call('HGET', KEYS[1], 'failed_on:' .. group) or '', '[^,]+') do
  if label ~= ARGV[7] then failed_on[#failed_on + 1] = label end
end
failed_on[#failed_on + 1] = ARGV[7]
failed_on = table.concat(failed_on, ',')
redis.call('HSET', KEYS[1], 'failed_on:' .. group, failed_on)
delay(KEYS[1], KEYS[2], KEYS[3], batch, group, r, now_ms() + tonumber(ARGV[10]), failed_on)
redis.call('HINCRBY', KEYS[1], 'retries', 1)
note(KEYS[6], 'retry', batch, group, r.attempt, ARGV[7], ARGV[8] .. ': ' .. ARGV[12])
return { 'retry' }
