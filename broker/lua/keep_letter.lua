-- Puts a letter on the stream of dead letters, which keeps the newest ones: about a thousand, in `most_bytes` of memory, and one in any case.
local function keep_letter(dead, letter, most_bytes)
  redis.call('XADD', dead, 'MAXLEN', '~', 1000, '*', unpack(letter))
  local count = redis.call('XLEN', dead)
  for left = count - 1, 1, -1 do
    -- A role that may not ask, or not trim, keeps the bound by number.
    local used = redis.pcall('MEMORY', 'USAGE', dead, 'SAMPLES', 0)
    if type(used) ~= 'number' or used <= tonumber(most_bytes) then return end
    if type(redis.pcall('XTRIM', dead, 'MAXLEN', left)) ~= 'number' then return end
  end
end
