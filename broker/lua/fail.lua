#!lua flags=allow-oom
-- An attempt failed: the group waits for a retry in `delayed`, or is buried once its class has used its attempts up.
-- KEYS: batch, groups, delayed, results, dead, events
-- ARGV: batch, group, route, entry, first_row, rows, token, instance, class(infra|data), limit, delay_ms, failure, reason
-- {'retry' | 'dead' | 'stale' | 'gone'}
local batch, group = ARGV[1], ARGV[2]
local h = redis.call('HMGET', KEYS[1], 'state', 'g:' .. group)
if not h[1] or h[1] == 'closed' then return { 'gone' } end
local r = parse(h[2])
if not r or r.token ~= ARGV[7] or r.status ~= 'running' then
  if r and r.token == ARGV[7] and r.status == 'failed' then return { 'dead' } end
  if r and r.token == ARGV[7] and r.status == 'delayed' then return { 'retry' } end
  count_stale(KEYS[1], KEYS[6], batch, group, r, ARGV[8], 'fail')
  return { 'stale' }
end
r[ARGV[9]] = r[ARGV[9]] + 1
if r[ARGV[9]] >= tonumber(ARGV[10]) then
  redis.call('HINCRBY', KEYS[1], 'dead_groups', 1)
  bury({ batch = KEYS[1], groups = KEYS[2], results = KEYS[4], dead = KEYS[5], events = KEYS[6] },
    { batch = batch, group = group, route = ARGV[3], rows = ARGV[6], first_row = ARGV[5], reason = ARGV[13], failure = ARGV[12] }, r)
  return { 'dead' }
end
r.status = 'delayed'
save(KEYS[1], group, r)
redis.call('HINCRBY', KEYS[1], 'retries', 1)
redis.call('XACK', KEYS[2], WORKERS, ARGV[4])
redis.call('ZADD', KEYS[3], now_ms() + tonumber(ARGV[11]), batch .. ' ' .. group .. ' ' .. ARGV[4] .. ' ' .. ARGV[8])
live_with(KEYS[3], KEYS[2])
note(KEYS[6], 'retry', batch, group, r.attempt, ARGV[8], ARGV[9] .. ': ' .. ARGV[13])
return { 'retry' }
