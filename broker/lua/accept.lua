#!lua flags=allow-oom
-- Last command of MULTI { XADD results NOMKSTREAM … × added, accept }: all of it counts or none. The payloads do not pass through here, unless the
-- server is at maxmemory and refuses the plain XADD: then they come as ARGV[12…], each entry as a count and its fields and values.
-- KEYS: batch, accepted, results, groups, events | ARGV: batch, group, token, entry, added, bytes, finish(0|1), rows, first_row, positions or 'all', instance
-- {'ok' | 'repeated' | 'stale' | 'gone' | 'incomplete', unread bytes, ''} or {'duplicate', 0, accepted positions}
local batch, group, token, entry, added = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local finish, rows, first_row = ARGV[7] == '1', tonumber(ARGV[8]), tonumber(ARGV[9])
local has_results = is_stream(KEYS[3])
local function refuse(answer, detail)
  if has_results then undo(KEYS[3], added) end
  return { answer, 0, detail or '' }
end

local h = redis.call('HMGET', KEYS[1], 'state', 'g:' .. group, 'group_size')
if not h[1] or h[1] == 'closed' or not has_results then return refuse('gone') end
local r = parse(h[2])
if not r or r.token ~= token or r.status ~= 'running' then
  if r and r.token == token and (r.status == 'done' or r.status == 'handed') then return refuse('repeated') end
  count_stale(KEYS[1], KEYS[5], batch, group, r, ARGV[11], 'accept')
  return refuse('stale')
end

local foreign = tonumber(h[3]) ~= rows
for at in string.gmatch(ARGV[10], '%d+') do foreign = foreign or tonumber(at) >= rows end
if foreign then
  refuse()
  return redis.error_reply('ERR group ' .. group .. ' has ' .. h[3] .. ' rows, and the entry or the positions accepted say otherwise')
end

-- A whole group at once is one field of the bitmap; a double holds 52 bits exactly.
local marked, clash, whole = {}, false, ARGV[10] == 'all' and rows <= 52
local field = 'u' .. rows
if whole then
  local before = redis.call('BITFIELD', KEYS[2], 'SET', field, first_row, string.format('%.0f', 2 ^ rows - 1))[1]
  clash = tonumber(before) ~= 0
  if clash or r.accepted ~= '0' then redis.call('BITFIELD', KEYS[2], 'SET', field, first_row, before) end
else
  local function mark(at)
    local bit = first_row + at
    if redis.call('SETBIT', KEYS[2], bit, 1) == 1 then clash = true else marked[#marked + 1] = bit end
  end
  if ARGV[10] == 'all' then for at = 0, rows - 1 do mark(at) end
  else for at in string.gmatch(ARGV[10], '%d+') do mark(tonumber(at)) end end
end
if redis.call('PTTL', KEYS[2]) < 0 then live_with(KEYS[2], KEYS[1]) end
local new = whole and rows or #marked
if clash or (finish and r.accepted + new ~= rows) then
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
r.accepted = r.accepted + new
if finish then
  drop_entry(KEYS[4], entry)
  r.status = 'done'
  redis.call('HINCRBY', KEYS[1], 'completed', 1)
end
save(KEYS[1], group, r)
note(KEYS[5], finish and 'finished' or 'accepted', batch, group, r.attempt, ARGV[11], ARGV[10])
return { 'ok', redis.call('HINCRBY', KEYS[1], 'unread_bytes', ARGV[6]), '' }
