#!lua flags=allow-oom
-- A graceful hand-back, not counted as a failure: any instance may take the group at once.
-- KEYS: batch, groups, delayed, events | ARGV: batch, group, token, instance
local h = redis.call('HMGET', KEYS[1], 'state', 'g:' .. ARGV[2])
if not h[1] or h[1] == 'closed' then return { 'gone' } end
local r = parse(h[2])
if not r or r.token ~= ARGV[3] or r.status ~= 'running' then
  if r and r.token == ARGV[3] and is_delayed(r) then return { 'ok' } end
  count_stale(KEYS[1], KEYS[4], ARGV[1], ARGV[2], r, ARGV[4], 'release')
  return { 'stale' }
end
delay(KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2], r, 0, '-')
note(KEYS[4], 'released', ARGV[1], ARGV[2], r.attempt, ARGV[4], 'handed back')
return { 'ok' }
