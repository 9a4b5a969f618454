#!lua flags=allow-oom
-- What had ended when the broker lost its data, as the client has seen it: its books are whole again, and whoever resumes the batch knows.
-- KEYS: batch | ARGV: incarnation, group_size, then per group its number and 'handed', 'done', 'failed' or 'told' (a failure that the trainer has had)
local h = redis.call('HMGET', KEYS[1], 'state', 'owner', 'groups', 'published')
if not h[1] or h[1] == 'closed' then return { 'closed' } end
if h[2] ~= ARGV[1] then return { 'not-owner' } end
-- A record that somebody deleted is missing too, and its group is counted already.
local lost = h[3] - h[4]
for i = 3, #ARGV, 2 do
  local group, word = ARGV[i], ARGV[i + 1]
  local failed = word == 'failed' or word == 'told'
  if lost > 0 and not redis.call('HGET', KEYS[1], 'g:' .. group) then
    lost = lost - 1
    local status, token, accepted = failed and 'failed' or word, word == 'told' and word or '-', failed and 0 or ARGV[2]
    redis.call('HSET', KEYS[1], 'g:' .. group, string.format('%s 0 %s - - 0 0 %d 0 0', status, token, accepted))
    redis.call('HINCRBY', KEYS[1], 'published', 1)
    redis.call('HINCRBY', KEYS[1], failed and 'failed' or 'completed', 1)
  end
end
return { 'ok' }
