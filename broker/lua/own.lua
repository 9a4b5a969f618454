#!lua flags=allow-oom
-- One live process per client name. After a broker's restart the holder has one lease to come back, however old its last renewal is.
-- KEYS: owner | ARGV: incarnation, lease_ms, ttl_ms, watched_ms (how long the broker is known to have run)
-- {'ok', 0} or {'taken', ms until the other's lease ends}
local value, now = redis.call('GET', KEYS[1]), now_ms()
if value then
  local holder, renewed = string.match(value, '^(%S+) (%d+)$')
  local left = math.max(tonumber(renewed) + tonumber(ARGV[2]) - now, tonumber(ARGV[2]) - tonumber(ARGV[4]))
  if holder ~= ARGV[1] and left > 0 then return { 'taken', left } end
end
redis.call('SET', KEYS[1], string.format('%s %d', ARGV[1], now), 'PX', ARGV[3])
return { 'ok', 0 }
