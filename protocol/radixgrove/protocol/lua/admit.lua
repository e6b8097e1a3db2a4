-- The worker began the prefill of these requests: their reservations stop counting as queued and
-- become time until which the prefill keeps the replica busy.
-- KEYS: reserved, load, leases
-- ARGV: generation, milliseconds a token, reservation ids…
if redis.call('HEXISTS', KEYS[3], ARGV[1]) == 0 then return 'UNKNOWN' end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local admitted = 0
for i = 3, #ARGV do
  local entry = redis.call('HGET', KEYS[1], ARGV[i])
  if entry then
    local router, tokens, generation = string.match(entry, '^(%S+) (%d+) (%S+)')
    if generation == ARGV[1] then
      redis.call('HDEL', KEYS[1], ARGV[i])
      local load = redis.call('HGET', KEYS[2], router)
      if load then
        local requests, queued = string.match(load, '(%d+) (%d+)')
        redis.call('HSET', KEYS[2], router, requests .. ' ' .. math.max(0, queued - tokens))
      end
      admitted = admitted + tokens
    end
  end
end
if admitted > 0 then
  local busy = math.max(now, tonumber(redis.call('HGET', KEYS[2], '@busy') or 0))
  redis.call('HSET', KEYS[2], '@busy', string.format('%.0f', busy + admitted * ARGV[2]))
end
return 'OK'
