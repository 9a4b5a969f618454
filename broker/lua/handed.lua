#!lua flags=allow-oom
-- The trainer has these groups: their result entries go; one that failed is marked by the token 'told'. KEYS: batch, results | ARGV: incarnation, bytes, groups ('3,4'), entry ids …
local h = redis.call('HMGET', KEYS[1], 'state', 'owner')
if h[1] and h[2] ~= ARGV[1] then return { 'not-owner' } end
local deleted = redis.call('XDEL', KEYS[2], unpack(ARGV, 4))
if not h[1] then return { 'gone' } end
if deleted > 0 then redis.call('HINCRBY', KEYS[1], 'unread_bytes', -tonumber(ARGV[2])) end
for group in string.gmatch(ARGV[3], '%d+') do
  local r = parse(redis.call('HGET', KEYS[1], 'g:' .. group))
  if r and r.status == 'done' then
    r.status = 'handed'
    save(KEYS[1], group, r)
  elseif r and r.status == 'failed' then
    r.token = 'told'
    save(KEYS[1], group, r)
  end
end
return { 'ok' }
