-- Takes away what a dead generation left. UNLINK frees big sets outside the server's main thread.
-- KEYS: leases, replicas, sequences, the generation's own keys…
-- ARGV: generation, replica id, grace ms (a paused worker may come back to its sets)
-- Returns 1 when the generation is gone.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lease = redis.call('HGET', KEYS[1], ARGV[1])
if not lease then return 0 end
local expires = struct.unpack('<d', lease)
if expires > 0 and expires + ARGV[3] > now then return 0 end
for i = 4, #KEYS do redis.call('UNLINK', KEYS[i]) end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
if registration(redis.call('HGET', KEYS[2], ARGV[2])).generation == ARGV[1] then
  redis.call('HDEL', KEYS[2], ARGV[2])
end
return 1
