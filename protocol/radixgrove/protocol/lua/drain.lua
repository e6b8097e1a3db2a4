-- From now on placement passes this generation by; what runs there is not touched.
-- KEYS: leases
-- ARGV: generation
-- Returns 'OK' or 'UNKNOWN'.
local lease = redis.call('HGET', KEYS[1], ARGV[1])
if not lease then return 'UNKNOWN' end
local expires = struct.unpack('<d', lease)
redis.call('HSET', KEYS[1], ARGV[1], struct.pack('<dB', expires, 2) .. string.sub(lease, 10))
return 'OK'
