#!lua flags=allow-oom
-- A graceful hand-back, not counted as a failure: any instance may take the group at once.
-- KEYS: batch, groups, delayed, events | ARGV: batch, group, entry, token, instance
local h = redis.call('HMGET', KEYS[1], 'state', 'g:' .. ARGV[2])
if not h[1] or h[1] == 'closed' then return { 'gone' } end
local r = parse(h[2])
if not r or r.token ~= ARGV[4] or r.status ~= 'running' then
  if r and r.token == ARGV[4] and r.status == 'delayed' then return { 'ok' } end
  count_stale(KEYS[1], KEYS[4], ARGV[1], ARGV[2], r, ARGV[5], 'release')
  return { 'stale' }
end
r.status = 'delayed'
save(KEYS[1], ARGV[2], r)
redis.call('XACK', KEYS[2], WORKERS, ARGV[3])
redis.call('ZADD', KEYS[3], 0, ARGV[1] .. ' ' .. ARGV[2] .. ' ' .. ARGV[3] .. ' -')
live_with(KEYS[3], KEYS[2])
note(KEYS[4], 'released', ARGV[1], ARGV[2], r.attempt, ARGV[5], 'handed back')
return { 'ok' }
