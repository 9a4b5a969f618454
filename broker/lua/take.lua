#!lua flags=allow-oom
-- Turns a delivered entry into an attempt with its own token, or says why not.
-- KEYS: batch, groups, owner, accepted, parked, results, dead, events, delayed, instance
-- ARGV: batch, group, route, entry, first_row, rows, token, consumer, instance, observing(0|1), lease_ms, abandon_ms, crash_limit, crash_failure, max_dead_bytes
-- {'ok', attempt, infra, data, ms since the first take, accepted positions, ms since it was published,
-- about how many groups of its batch wait for their first take on this shard}, or {'stale' | 'gone' | 'parked' | 'dead' | 'suspect' | 'unknown'}
local batch, group, entry, token = ARGV[1], ARGV[2], ARGV[4], ARGV[7]

-- A broker that lost its data has no such stream; the group comes again.
if not is_stream(KEYS[2]) then return { 'stale' } end
local held = redis.call('XPENDING', KEYS[2], WORKERS, entry, entry, 1)
if #held == 0 or held[1][2] ~= ARGV[8] then return { 'stale' } end
local h = redis.call('HMGET', KEYS[1], 'state', 'unread_bytes', 'max_unread_bytes', 'rank', 'g:' .. group, 'owner')
local r = parse(h[5])
if not h[1] or h[1] == 'closed' or (r and has_ended(r)) then
  drop_entry(KEYS[2], entry)
  return { 'gone' }
end
if not r then return { 'unknown' } end
if r.status ~= 'queued' and r.entry ~= entry then
  drop_entry(KEYS[2], entry)
  return { 'gone' }
end
-- A token is used once: this call was sent again, and its attempt has ended meanwhile. The one that is due has a token of its own.
if r.token == token and r.status ~= 'running' then return { 'stale' } end
local now = now_ms()
local first = tonumber(r.attempt) == 0
r.entry = entry

if r.status == 'running' and r.token ~= token then
  redis.call('HINCRBY', KEYS[1], 'redeliveries', 1)
  note(KEYS[8], 'lost', batch, group, r.attempt, r.instance, 'lease expired; taken over by ' .. ARGV[9])
  r.infra = r.infra + 1
  if r.infra >= tonumber(ARGV[13]) then
    r.token = '-'
    redis.call('HINCRBY', KEYS[1], 'dead_groups', 1)
    bury({ batch = KEYS[1], groups = KEYS[2], results = KEYS[6], dead = KEYS[7], events = KEYS[8] },
      { batch = batch, group = group, route = ARGV[3], rows = ARGV[6], first_row = ARGV[5], reason = 'crashed', failure = ARGV[14] }, r, ARGV[15])
    return { 'dead' }
  end
  -- One more loss and it is buried. If it is what kills its instances, it must not take another in the same plight with it.
  if r.infra == ARGV[13] - 1 then
    r.status = 'suspect'
    redis.call('HSET', KEYS[1], 'last_chance:' .. group, 1)
  end
end
local suspect = r.status == 'suspect'
if suspect and runs_suspect(KEYS[10], string.match(KEYS[1], '^(.*:batch:)')) then
  delay(KEYS[1], KEYS[2], KEYS[9], batch, group, r, now + 500, '-')
  return { 'suspect' }
end

local absent = owner_absence(KEYS[1], h[6], KEYS[3], tonumber(ARGV[11]), now)
if absent and absent > tonumber(ARGV[12]) and ARGV[10] == '1' then
  if first then count_queued(KEYS[1], KEYS[2], -tonumber(r.bytes)) end
  abandon(KEYS[1], KEYS[8], batch, group, r, ARGV[9])
  drop_entry(KEYS[2], entry)
  return { 'gone' }
end
local full = first and (tonumber(h[2]) or 0) >= (tonumber(h[3]) or math.huge)
if absent and not first then
  -- Not among those that wait for room: its own rows, accepted before, may be what takes the room, and only it can free it.
  delay(KEYS[1], KEYS[2], KEYS[9], batch, group, r, now + 200, '-')
  return { 'parked' }
end
if absent or full then
  r.status = 'parked'
  save(KEYS[1], group, r)
  redis.call('XACK', KEYS[2], WORKERS, entry)
  redis.call('ZADD', KEYS[5], h[4], batch .. ' ' .. group .. ' ' .. entry)
  live_with(KEYS[5], KEYS[2])
  return { 'parked' }
end

local waiting = 0
if not (r.status == 'running' and r.token == token) then
  r.attempt = r.attempt + 1
  if first then waiting = math.floor(count_queued(KEYS[1], KEYS[2], -tonumber(r.bytes)) / math.max(1, tonumber(r.bytes))) end
  if tonumber(r.first_take) == 0 then r.first_take = now end
  r.status, r.token, r.instance = 'running', token, ARGV[9]
  save(KEYS[1], group, r)
  if suspect and redis.call('EXISTS', KEYS[10]) == 1 then redis.call('HSET', KEYS[10], 'suspect', batch .. ' ' .. group .. ' ' .. token) end
  note(KEYS[8], 'taken', batch, group, r.attempt, ARGV[9], '')
end
local accepted = {}
if tonumber(r.accepted) > 0 then
  for at = 0, tonumber(ARGV[6]) - 1 do
    if redis.call('GETBIT', KEYS[4], tonumber(ARGV[5]) + at) == 1 then accepted[#accepted + 1] = at end
  end
end
local published = tonumber(string.match(entry, '^%d+'))
return { 'ok', tonumber(r.attempt), tonumber(r.infra), tonumber(r.data), now - tonumber(r.first_take), table.concat(accepted, ','),
  math.max(0, now - published), waiting }
