#!lua flags=allow-oom
-- The client ends a group that nobody will finish in time, or brings one back that nobody knows of any more.
-- KEYS: batch, groups, delayed, parked, results, dead, events
-- ARGV: batch, group, route, entry or '-', first_row, rows, incarnation, reason(deadline|no_instance|vanished), timeout_ms, failure, max_dead_bytes
-- {'dead' | 'again' | 'early' | 'over' | 'gone' | 'not-owner'}
local batch, group = ARGV[1], ARGV[2]

local function id(text)
  local ms, seq = string.match(text, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end

-- Whether an entry was delivered, or passed over, and is pending for nobody: somebody deleted its consumer, or moved the group on.
-- Without a consumer group the next worker makes one, and reads all from the start.
local function is_forgotten(groups, entry)
  local pending = redis.pcall('XPENDING', groups, WORKERS, entry, entry, 1)
  if pending.err or #pending > 0 then return false end
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', groups)) do
    local facts = {}
    for i = 1, #info, 2 do facts[info[i]] = info[i + 1] end
    if facts['name'] == WORKERS then
      local ms, seq = id(entry)
      local last_ms, last_seq = id(facts['last-delivered-id'])
      return ms < last_ms or (ms == last_ms and seq <= last_seq)
    end
  end
  return false
end

local h = redis.call('HMGET', KEYS[1], 'state', 'owner', 'g:' .. group)
if not h[1] or h[1] == 'closed' then return { 'gone' } end
if h[2] ~= ARGV[7] then return { 'not-owner' } end
local r = parse(h[3])
if not r or has_ended(r) then return { 'over' } end
if ARGV[8] == 'deadline' and (tonumber(r.first_take) == 0 or now_ms() - tonumber(r.first_take) < tonumber(ARGV[9])) then return { 'early' } end
if ARGV[8] == 'no_instance' and r.status == 'running' then
  -- Whoever ran it has not renewed for so long, and nobody is there to take it over.
  local held = redis.pcall('XPENDING', KEYS[2], WORKERS, r.entry, r.entry, 1)
  if not held.err and #held > 0 and held[1][3] < tonumber(ARGV[9]) then return { 'early' } end
end
if r.entry == '-' then r.entry = ARGV[4] end
local member, waits = batch .. ' ' .. group .. ' ' .. r.entry, {}
for _, m in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
  if string.sub(m, 1, #member + 1) == member .. ' ' then waits[#waits + 1] = m end
end
if ARGV[8] == 'vanished' then
  -- Nobody has taken it, and its client does not know its entry: it is gone for certain only where none is left.
  if r.entry == '-' and redis.call('XLEN', KEYS[2]) > 0 then return { 'early' } end
  if r.entry ~= '-' and #redis.call('XRANGE', KEYS[2], r.entry, r.entry) > 0 then
    if #waits > 0 or redis.call('ZSCORE', KEYS[4], member) or not is_forgotten(KEYS[2], r.entry) then return { 'early' } end
    delay(KEYS[1], KEYS[2], KEYS[3], batch, group, r, now_ms(), '-')
    note(KEYS[7], 'found', batch, group, r.attempt, r.instance, 'its delivery was forgotten; it is due again')
    return { 'again' }
  end
end
redis.call('ZREM', KEYS[4], member)
for _, m in ipairs(waits) do redis.call('ZREM', KEYS[3], m) end
redis.call('HINCRBY', KEYS[1], 'dead_groups', 1)
if r.entry == '-' then r.entry = '0-1' end
bury({ batch = KEYS[1], groups = KEYS[2], results = KEYS[5], dead = KEYS[6], events = KEYS[7] },
  { batch = batch, group = group, route = ARGV[3], rows = ARGV[6], first_row = ARGV[5], reason = ARGV[8], failure = ARGV[10] }, r, ARGV[11])
return { 'dead' }
