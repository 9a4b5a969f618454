#!lua flags=allow-oom
-- A stranger's entry on a groups or results stream: kept as a dead letter, so that it is neither lost nor met again.
-- KEYS: stream, dead, events | ARGV: entry, reason, max_dead_bytes
local found = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])
if found[1] then
  local letter = { 'reason', 'foreign', 'detail', ARGV[2] }
  -- A stranger may have any number of fields, and one call takes only so many.
  for i = 1, math.min(#found[1][2], 200) do letter[#letter + 1] = found[1][2][i] end
  keep_letter(KEYS[2], letter, ARGV[3])
  note(KEYS[3], 'foreign', '-', '-', 0, '-', ARGV[2])
end
drop_entry(KEYS[1], ARGV[1])
return #found
