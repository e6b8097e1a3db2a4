-- A replica renews its lease and says how busy it is.
-- KEYS: replicas, leases, load
-- ARGV: replica id, generation, lease ms, state, load report, '1' when the engine is idle
-- Returns 'OK', 'DRAINING', 'UNKNOWN' (register again) or 'SUPERSEDED'.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local lease = redis.call('HGET', KEYS[2], ARGV[2])
if not lease then return 'UNKNOWN' end
local expires, state = struct.unpack('<dB', lease)
if expires == 0 then
  local current = redis.call('HGET', KEYS[1], ARGV[1])
  local generation = current and cjson.decode(current).generation
  local other = generation and generation ~= ARGV[2] and redis.call('HGET', KEYS[2], generation)
  if other and struct.unpack('<d', other) > now then return 'SUPERSEDED' end
  return 'UNKNOWN'
end

-- Draining ends only with the generation.
if state ~= 2 then state = tonumber(ARGV[4]) end
redis.call('HSET', KEYS[2], ARGV[2], struct.pack('<dB', now + ARGV[3], state) .. ARGV[5])
if ARGV[6] == '1' then redis.call('HDEL', KEYS[3], '@busy') end
return state == 2 and 'DRAINING' or 'OK'
