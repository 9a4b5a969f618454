-- Last command of MULTI { XADD groups NOMKSTREAM …, publish }: one group, once per batch and group.
-- KEYS: batch, groups, events | ARGV: incarnation, batch, group, bytes
if not is_stream(KEYS[2]) then return { 'no-stream', 0 } end
local h = redis.call('HMGET', KEYS[1], 'state', 'owner', 'g:' .. ARGV[3])
local refusal
if not h[1] or h[1] == 'closed' then refusal = 'closed'
elseif h[2] ~= ARGV[1] then refusal = 'not-owner'
elseif h[3] then refusal = 'repeated'
elseif h[1] ~= 'open' then refusal = 'sealed' end
if refusal then
  undo(KEYS[2], 1)
  return { refusal, refusal == 'repeated' and count_queued(KEYS[1], KEYS[2], 0) or 0 }
end
redis.call('HSET', KEYS[1], 'g:' .. ARGV[3], 'queued 0 - - - 0 0 0 ' .. ARGV[4] .. ' 0')
redis.call('HINCRBY', KEYS[1], 'published', 1)
note(KEYS[3], 'published', ARGV[2], ARGV[3], 0, '-', ARGV[4] .. ' bytes')
return { 'ok', count_queued(KEYS[1], KEYS[2], ARGV[4]) }
