-- Takes a batch's unfinished groups off every stream and set. shards: list of {groups, delayed, parked}; ids: entry ids per shard known to the caller.
-- Returns how many groups had not ended. A stream that somebody replaced by something else is left alone.
local function purge(batch_key, batch, shards, ids)
  local unfinished = 0
  local function drop(stream, entry) if is_stream(stream) then drop_entry(stream, entry) end end
  local all = redis.call('HGETALL', batch_key)
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, 2) == 'g:' then
      local r = parse(all[i + 1])
      if not r or not has_ended(r) then
        unfinished = unfinished + 1
        if r and r.entry ~= '-' then
          for _, shard in ipairs(shards) do drop(shard.groups, r.entry) end
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
