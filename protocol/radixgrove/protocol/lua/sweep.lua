-- Drops reservations of dead routers, and those older than any request may be.
-- KEYS: routers, reserved
-- ARGV: oldest age ms
-- Returns how many were dropped.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local live = {}
for _, router in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], now, now + 120000)) do live[router] = true end
local entries, dropped = redis.call('HGETALL', KEYS[2]), 0
for i = 1, #entries, 2 do
  local router, placed = string.match(entries[i + 1], '^(%S+) .* (%d+)$')
  if not live[router] or now - placed > tonumber(ARGV[1]) then
    redis.call('HDEL', KEYS[2], entries[i])
    dropped = dropped + 1
  end
end
return dropped
