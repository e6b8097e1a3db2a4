-- A request ended, or its first byte came: what is left of its reservation stops counting.
-- KEYS: reserved, load, leases
-- ARGV: reservation id, generation, router id, requests to release
if redis.call('HEXISTS', KEYS[3], ARGV[2]) == 0 then return 'UNKNOWN' end
local tokens = 0
local entry = redis.call('HGET', KEYS[1], ARGV[1])
if entry then
  -- Whoever removes the entry, router or worker, takes its tokens back: never both.
  tokens = tonumber(string.match(entry, '^%S+ (%d+)'))
  redis.call('HDEL', KEYS[1], ARGV[1])
end
local load = redis.call('HGET', KEYS[2], ARGV[3])
if load then
  local requests, queued = string.match(load, '(%d+) (%d+)')
  requests, queued = math.max(0, requests - ARGV[4]), math.max(0, queued - tokens)
  if requests == 0 and queued == 0 then
    redis.call('HDEL', KEYS[2], ARGV[3])
  else
    redis.call('HSET', KEYS[2], ARGV[3], requests .. ' ' .. queued)
  end
end
return 'OK'
