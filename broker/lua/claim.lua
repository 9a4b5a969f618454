#!lua flags=allow-oom
-- Finds groups that may run again: due retries, parked ones whose batch has room, and those whose lease expired.
-- KEYS: groups, delayed, parked | ARGV: consumer, instance, lease_ms, limit, observing(0|1), run prefix, abandon_ms, patience_ms, living peer …
-- { {entry, …}, ms until the next retry for this instance is due or -1, parked groups }. Claimed entries must be read and taken as any other.
local PAGE, MOST_LOOKED_AT = 64, 2048
local groups, consumer, limit = KEYS[1], ARGV[1], tonumber(ARGV[4])
local lease_ms, prefix, now, out = tonumber(ARGV[3]), ARGV[6], now_ms(), {}
if not is_stream(groups) then return { out, -1, 0 } end

local function claim(entry, idle, force)
  local got
  if force then got = redis.call('XCLAIM', groups, WORKERS, consumer, idle, entry, 'FORCE', 'JUSTID')
  else got = redis.call('XCLAIM', groups, WORKERS, consumer, idle, entry, 'JUSTID') end
  if #got > 0 then out[#out + 1] = entry end
end

-- Whether a group that failed on `labels`, the last one last, may run here: first on whoever has not failed it, then on any but the last.
-- One that has been due for long may run anywhere: the others live, and have no place for it.
local function may_run_here(labels, due)
  local failed_on, last = {}, nil
  for label in string.gmatch(labels, '[^,]+') do failed_on[label], last = true, label end
  if not failed_on[ARGV[2]] or now - due > tonumber(ARGV[8]) then return true end
  for i = 9, #ARGV do
    if last == ARGV[2] or not failed_on[ARGV[i]] then return false end
  end
  return true
end

-- Of groups on their last chance one at a time: if one is what kills its instances, the others would be lost with it, taken or not.
local has_suspect, more_due = runs_suspect(prefix .. 'instance:' .. ARGV[2], prefix .. 'batch:'), false
-- Takes what may run here of `due`, members with their scores; how many were taken.
local function take_due(due)
  local taken = 0
  for i = 1, #due, 2 do
    local batch, group, entry, labels = string.match(due[i], '^(%S+) (%S+) (%S+) (%S+)$')
    if labels and may_run_here(labels, tonumber(due[i + 1])) then
      local r = parse(redis.call('HGET', prefix .. 'batch:' .. batch, 'g:' .. group))
      local suspect = r and r.status == 'suspect'
      if not (suspect and has_suspect) then
        if #out >= limit then more_due = true return taken end
        redis.call('ZREM', KEYS[2], due[i])
        taken = taken + 1
        claim(entry, 0, true)
        has_suspect = has_suspect or suspect
      end
    end
  end
  return taken
end

-- Those that are left to others may stand before those that are not; a bound keeps the broker free for everybody else.
local looked = 0
while looked < MOST_LOOKED_AT and not more_due do
  local due = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'WITHSCORES', 'LIMIT', looked, PAGE)
  looked = looked + #due / 2 - take_due(due)
  if #due < 2 * PAGE then break end
end

local function has_room(batch)
  local key = prefix .. 'batch:' .. batch
  local h = redis.call('HMGET', key, 'state', 'unread_bytes', 'max_unread_bytes', 'client', 'owner')
  if not h[1] or h[1] == 'closed' then return nil end
  local absent = owner_absence(key, h[5], prefix .. 'owner:' .. h[4], lease_ms, now)
  if absent then return ARGV[5] == '1' and absent > tonumber(ARGV[7]) end  -- claimed only to be dropped by take
  return (tonumber(h[2]) or 0) < (tonumber(h[3]) or math.huge)
end

local rank = '-inf'
for _ = 1, 32 do
  local head = redis.call('ZRANGEBYSCORE', KEYS[3], rank, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  if #out >= limit or #head == 0 then break end
  local room = has_room(string.match(head[1], '^%S+'))
  if room == nil then
    for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], head[2], head[2])) do
      redis.call('ZREM', KEYS[3], member)
      drop_entry(groups, string.match(member, '(%S+)$'))
    end
  elseif room then
    for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], head[2], head[2], 'LIMIT', 0, limit - #out)) do
      redis.call('ZREM', KEYS[3], member)
      claim(string.match(member, '(%S+)$'), 0, true)
    end
  end
  rank = '(' .. head[2]
end

if ARGV[5] == '1' and #out < limit then
  for _, held in ipairs(redis.call('XPENDING', groups, WORKERS, 'IDLE', lease_ms, '-', '+', limit - #out)) do
    claim(held[1], lease_ms, false)
  end
end
-- What is due and was left is another's to take.
local due = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
return { out, more_due and 0 or due[2] and tonumber(due[2]) - now or -1, redis.call('ZCARD', KEYS[3]) }
