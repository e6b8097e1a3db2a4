-- A replica renews its lease and says how busy it is.
-- KEYS: replicas, leases, load
-- ARGV: replica id, generation, lease ms, state, load report, milliseconds of prefill that running
--       requests have yet to get ('' where the report is not new), milliseconds a token as measured
--       ('' where they were not), what else was measured
-- Returns 'OK', 'DRAINING', 'UNKNOWN' (register again) or 'SUPERSEDED'.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local lease = redis.call('HGET', KEYS[2], ARGV[2])
if not lease then return 'UNKNOWN' end
local expires, state = struct.unpack('<dB', lease)
local generation = registration(redis.call('HGET', KEYS[1], ARGV[1])).generation
-- A lease without a registration is of no use: routers do not find the replica.
if expires == 0 or generation ~= ARGV[2] then
  local other = generation ~= ARGV[2] and redis.call('HGET', KEYS[2], generation)
  if other and struct.unpack('<d', other) > now then return 'SUPERSEDED' end
  return 'UNKNOWN'
end

-- Draining ends only with the generation, or by undrain.lua.
if state ~= 2 then state = tonumber(ARGV[4]) end
redis.call('HSET', KEYS[2], ARGV[2], struct.pack('<dB', now + ARGV[3], state) .. ARGV[5])
-- What is known of the engine replaces what was booked: nothing adds up, whatever was estimated.
if ARGV[6] ~= '' then
  if tonumber(ARGV[6]) > 0 then
    redis.call('HSET', KEYS[3], '@busy', string.format('%.0f', now + ARGV[6]))
  else
    redis.call('HDEL', KEYS[3], '@busy')
  end
end
if ARGV[7] ~= '' then redis.call('HSET', KEYS[3], '@ms', ARGV[7]) end
redis.call('HSET', KEYS[3], '@measured', ARGV[8])
redis.call('PEXPIRE', KEYS[3], 60000) -- as router_heartbeat.lua does
return state == 2 and 'DRAINING' or 'OK'
