#!lua flags=allow-oom
-- The trainer has these groups: their result entries go; one that failed is marked by the token 'told'.
-- It may have every row of a group before the instance has said that it is finished, or died over it: then the group ends here.
-- KEYS: batch, results, groups, events | ARGV: incarnation, bytes, groups ('3,4'), entry ids …
local h = redis.call('HMGET', KEYS[1], 'state', 'owner', 'group_size')
if h[1] and h[2] ~= ARGV[1] then return { 'not-owner' } end
local deleted = redis.call('XDEL', KEYS[2], unpack(ARGV, 4))
if not h[1] then return { 'gone' } end
if deleted > 0 then redis.call('HINCRBY', KEYS[1], 'unread_bytes', -tonumber(ARGV[2])) end
for group in string.gmatch(ARGV[3], '%d+') do
  local r = parse(redis.call('HGET', KEYS[1], 'g:' .. group))
  if r and r.status == 'failed' then
    r.token = 'told'
    save(KEYS[1], group, r)
  elseif r and (r.status == 'done' or (r.accepted == h[3] and not has_ended(r))) and h[1] ~= 'closed' then
    if r.status ~= 'done' then
      drop_entry(KEYS[3], r.entry)
      redis.call('HINCRBY', KEYS[1], 'completed', 1)
      note(KEYS[4], 'finished', string.match(KEYS[1], ':batch:(.+)$'), group, r.attempt, r.instance, 'all rows are with the trainer')
    end
    r.status = 'handed'
    save(KEYS[1], group, r)
  end
end
return { 'ok' }
