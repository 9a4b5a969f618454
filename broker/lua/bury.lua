-- Ends a group for good: dead letter with its whole entry, failure to the client, entry gone, books kept.
-- k: batch, groups, results, dead, events. w: batch, group, route, rows, first_row, reason, failure (msgpack).
local function bury(k, w, r, most_dead_bytes)
  local found = redis.call('XRANGE', k.groups, r.entry, r.entry)
  local letter = { 'reason', w.reason, 'failure', w.failure, 'failed_attempt', r.attempt, 'failed_on', r.instance }
  if found[1] then
    for _, word in ipairs(found[1][2]) do letter[#letter + 1] = word end
  else
    for _, word in ipairs({ 'kind', 'group', 'batch', w.batch, 'group', w.group, 'route', w.route, 'rows', w.rows }) do
      letter[#letter + 1] = word
    end
  end
  keep_letter(k.dead, letter, most_dead_bytes)
  drop_entry(k.groups, r.entry)
  if is_stream(k.results) then
    redis.call('XADD', k.results, '*', 'kind', 'failed', 'batch', w.batch, 'group', w.group, 'route', w.route, 'rows', w.rows,
      'first_row', w.first_row, 'attempt', r.attempt, 'instance', r.instance, 'payload', w.failure)
    redis.call('HINCRBY', k.batch, 'unread_bytes', #w.failure)
  end
  if tonumber(r.attempt) == 0 then count_queued(k.batch, k.groups, -tonumber(r.bytes)) end
  r.status = 'failed'
  save(k.batch, w.group, r)
  redis.call('HINCRBY', k.batch, 'failed', 1)
  note(k.events, 'dead', w.batch, w.group, r.attempt, r.instance, w.reason)
end
