-- What every transition shares. A group's record is one field of the batch hash, `g:<group>`, ten words long:
--   status attempt token instance entry infra data accepted bytes first_take
-- status: queued, parked, delayed, suspect (delayed, on its last chance), running, done, handed, failed, abandoned. `infra` and `data` count lost attempts by class, `first_take` is broker time in ms.
local WORKERS = 'workers'
local RECORD = '^(%S+) (%d+) (%S+) (%S+) (%S+) (%d+) (%d+) (%d+) (%d+) (%d+)$'

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function parse(raw)
  if not raw then return nil end
  local r = {}
  r.status, r.attempt, r.token, r.instance, r.entry, r.infra, r.data, r.accepted, r.bytes, r.first_take = string.match(raw, RECORD)
  -- What somebody else wrote there is no record.
  return r.status and r or nil
end

local ENDED = { done = true, handed = true, failed = true, abandoned = true }
local function has_ended(r) return ENDED[r.status] end

local function is_delayed(r) return r.status == 'delayed' or r.status == 'suspect' end

local function save(batch, group, r)
  redis.call('HSET', batch, 'g:' .. group, string.format('%s %d %s %s %s %d %d %d %d %d', r.status, tonumber(r.attempt), r.token,
    r.instance, r.entry, tonumber(r.infra), tonumber(r.data), tonumber(r.accepted), tonumber(r.bytes), tonumber(r.first_take)))
end

local function note(events, kind, batch, group, attempt, instance, detail)
  redis.call('XADD', events, 'MAXLEN', '~', 20000, '*', 'kind', kind, 'batch', batch, 'group', group, 'attempt', attempt,
    'instance', instance, 'detail', detail)
end

-- Deletes the entries that the transaction around this script has just added: nobody has seen them.
local function undo(stream, added)
  if added == 0 then return end
  for _, entry in ipairs(redis.call('XREVRANGE', stream, '+', '-', 'COUNT', added)) do redis.call('XDEL', stream, entry[1]) end
end

-- A fleet's version is that of its routes, a dot, and that of its shards' records, which may change while batches are open.
local function routes_of(version) return string.match(version, '^[^.]*') end

local function is_stream(key)
  local kind = redis.call('TYPE', key)
  return (kind.ok or kind) == 'stream'
end

-- Redis makes a stream without entries only together with a consumer group.
local function make_stream(key)
  redis.call('XGROUP', 'CREATE', key, 'none', '0', 'MKSTREAM')
  redis.call('XGROUP', 'DESTROY', key, 'none')
end

-- A key beside a stream lives as long as it: both are renewed together.
local function live_with(key, stream)
  local ttl = redis.call('PTTL', stream)
  if ttl > 0 then redis.call('PEXPIRE', key, math.max(1000, ttl)) end
end

-- Sets a group aside until `due` (ms), for others than `failed_on` while there are any: labels joined by commas, the last one last, or '-'.
-- Its entry stays on the stream, pending for nobody, and one on its last chance stays that, whatever set it aside.
local function delay(batch_key, groups, delayed, batch, group, r, due, failed_on)
  r.status = redis.call('HGET', batch_key, 'last_chance:' .. group) and 'suspect' or 'delayed'
  save(batch_key, group, r)
  redis.call('XACK', groups, WORKERS, r.entry)
  redis.call('ZADD', delayed, due, batch .. ' ' .. group .. ' ' .. r.entry .. ' ' .. failed_on)
  live_with(delayed, groups)
end

-- A write by an attempt that lost its lease is refused, counted and noted.
local function count_stale(batch_key, events, batch, group, r, instance, what)
  redis.call('HINCRBY', batch_key, 'stale_writes', 1)
  note(events, 'refused', batch, group, r and r.attempt or 0, instance, what .. ' by an attempt that lost its lease')
end

-- The client of this group stayed away for too long. Its record stays, so that a publication that is repeated finds it and is not another one.
local function abandon(batch_key, events, batch, group, r, instance)
  r.status, r.token = 'abandoned', '-'
  save(batch_key, group, r)
  redis.call('HINCRBY', batch_key, 'cancelled', 1)
  note(events, 'abandoned', batch, group, r.attempt, instance, 'its client is gone')
end

local function drop_entry(groups, entry)
  redis.call('XACK', groups, WORKERS, entry)
  redis.call('XDEL', groups, entry)
end

-- Whether an instance runs a group on its last chance. `batches` is what the names of all batches begin with.
local function runs_suspect(instance, batches)
  local b, g, t = string.match(redis.call('HGET', instance, 'suspect') or '', '^(%S+) (%S+) (%S+)$')
  local other = b and parse(redis.call('HGET', batches .. b, 'g:' .. g))
  return other and other.status == 'running' and other.token == t
end

-- Bytes that a batch has waiting on one shard stand in a field of their own: admission is per shard.
local function count_queued(batch, groups, bytes)
  return redis.call('HINCRBY', batch, 'queued_bytes:' .. string.match(groups, ':groups:(.+)$'), bytes)
end

-- When it was first seen that another process has the name of this batch's client: until that resumes the batch, nobody has it.
local function left_since(batch_key, owner, now)
  local left, since = string.match(redis.call('HGET', batch_key, 'left') or '', '^(%S+) (%d+)$')
  if left == owner then return tonumber(since) end
  redis.call('HSET', batch_key, 'left', string.format('%s %d', owner, now))
  return now
end

-- How long the process that owns a batch has not renewed its lease: nil while it is alive, else milliseconds.
local function owner_absence(batch_key, owner, owner_key, lease_ms, now)
  local value = redis.call('GET', owner_key)
  if not value then return now end
  local holder, renewed = string.match(value, '^(%S+) (%d+)$')
  if holder ~= owner then return now - left_since(batch_key, owner or '-', now) end
  if now - tonumber(renewed) <= lease_ms then return nil end
  return now - tonumber(renewed)
end
