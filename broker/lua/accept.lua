#!lua flags=allow-oom
-- Last command of MULTI { XADD results NOMKSTREAM … × added, accept }: all of it counts or none. The payloads do not pass through here, unless the
-- server is at maxmemory and refuses the plain XADD: then they come as ARGV[12…], each entry as a count and its fields and values.
-- KEYS: batch, accepted, results, groups, events | ARGV: batch, group, token, entry, added, bytes, finish(0|1), rows, first_row, positions, instance
-- {'ok' | 'repeated' | 'stale' | 'gone' | 'incomplete', unread bytes, ''} or {'duplicate', 0, accepted positions}
local batch, group, token, entry, added = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local finish, rows, first_row = ARGV[7] == '1', tonumber(ARGV[8]), tonumber(ARGV[9])
local has_results = is_stream(KEYS[3])
local function refuse(answer, detail)
  if has_results then undo(KEYS[3], added) end
  return { answer, 0, detail or '' }
end

local h = redis.call('HMGET', KEYS[1], 'state', 'g:' .. group)
if not h[1] or h[1] == 'closed' or not has_results then return refuse('gone') end
local r = parse(h[2])
if not r or r.token ~= token or r.status ~= 'running' then
  if r and r.token == token and (r.status == 'done' or r.status == 'handed') then return refuse('repeated') end
  redis.call('HINCRBY', KEYS[1], 'stale_writes', 1)
  note(KEYS[5], 'refused', batch, group, r and r.attempt or 0, ARGV[11], 'accept by an attempt that lost its lease')
  return refuse('stale')
end

local marked, clash = {}, false
for at in string.gmatch(ARGV[10], '%d+') do
  local bit = first_row + tonumber(at)
  if redis.call('SETBIT', KEYS[2], bit, 1) == 1 then clash = true else marked[#marked + 1] = bit end
end
if clash or (finish and r.accepted + #marked ~= rows) then
  for _, bit in ipairs(marked) do redis.call('SETBIT', KEYS[2], bit, 0) end
  if not clash then return refuse('incomplete', tostring(r.accepted)) end
  redis.call('HINCRBY', KEYS[1], 'duplicate_rows', 1)
  local seen = {}
  for at = 0, rows - 1 do if redis.call('GETBIT', KEYS[2], first_row + at) == 1 then seen[#seen + 1] = at end end
  return refuse('duplicate', table.concat(seen, ','))
end

local i = 12
while i <= #ARGV do
  redis.call('XADD', KEYS[3], '*', unpack(ARGV, i + 1, i + tonumber(ARGV[i])))
  i = i + tonumber(ARGV[i]) + 1
end
if redis.call('PTTL', KEYS[2]) < 0 then redis.call('PEXPIRE', KEYS[2], math.max(1000, redis.call('PTTL', KEYS[1]))) end
r.accepted = r.accepted + #marked
if finish then
  drop_entry(KEYS[4], entry)
  r.status = 'done'
  redis.call('HINCRBY', KEYS[1], 'completed', 1)
end
save(KEYS[1], group, r)
note(KEYS[5], finish and 'finished' or 'accepted', batch, group, r.attempt, ARGV[11], ARGV[10])
return { 'ok', redis.call('HINCRBY', KEYS[1], 'unread_bytes', ARGV[6]), '' }
