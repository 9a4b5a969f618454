-- The groups stream of each group, as far as the batch's layout says it: on another stream the same id may be another batch's group.
local function homes_of(batch_key, shards)
  local by_name, homes, group = {}, {}, 0
  for _, shard in ipairs(shards) do by_name[string.match(shard.groups, ':groups:(.+)$')] = shard.groups end
  local h = redis.call('HMGET', batch_key, 'layout', 'groups')
  -- Somebody may have changed it.
  local sound, runs = pcall(cjson.decode, h[1] or '')
  for _, run in ipairs(sound and type(runs) == 'table' and runs or {}) do
    local count = type(run) == 'table' and tonumber(run[3]) or 0
    for _ = 1, math.min(count, (tonumber(h[2]) or 0) - group) do
      homes[group] = by_name[run[1]]
      group = group + 1
    end
  end
  return homes
end

-- Takes a batch's unfinished groups off every stream and set. shards: list of {groups, delayed, parked}; ids: entry ids per shard known to the caller.
-- Returns how many groups had not ended. A stream that somebody replaced by something else is left alone.
local function purge(batch_key, batch, shards, ids)
  local unfinished, homes = 0, nil
  local function drop(stream, entry) if is_stream(stream) then drop_entry(stream, entry) end end
  local all = redis.call('HGETALL', batch_key)
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, 2) == 'g:' then
      local r = parse(all[i + 1])
      if not r or not has_ended(r) then
        unfinished = unfinished + 1
        if r and r.entry ~= '-' then
          -- Looked up only for a batch that ends with something under way. What has no known place is dropped by whoever takes it.
          homes = homes or homes_of(batch_key, shards)
          local home = homes[tonumber(string.sub(all[i], 3))]
          for _, shard in ipairs(shards) do
            if home == shard.groups or #shards == 1 then drop(shard.groups, r.entry) end
          end
        end
      end
    end
  end
  for s, shard in ipairs(shards) do
    for _, id in ipairs(ids[s] or {}) do drop(shard.groups, id) end
    for _, key in ipairs({ shard.delayed, shard.parked }) do
      for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do
        if string.match(member, '^%S+') == batch then redis.call('ZREM', key, member) end
      end
    end
  end
  return unfinished
end
