-- Placement may choose again a generation that a router drained. One that drains by itself says so
-- with its next heartbeat.
-- KEYS: leases
-- ARGV: generation
-- Returns 'OK' or 'UNKNOWN'.
local lease = redis.call('HGET', KEYS[1], ARGV[1])
if not lease then return 'UNKNOWN' end
local expires, state = struct.unpack('<dB', lease)
if state == 2 then
  redis.call('HSET', KEYS[1], ARGV[1], struct.pack('<dB', expires, 1) .. string.sub(lease, 10))
end
return 'OK'
