-- A replica leaves: its lease ends now, the janitor takes its keys.
-- KEYS: replicas, leases
-- ARGV: replica id, generation
if registration(redis.call('HGET', KEYS[1], ARGV[1])).generation == ARGV[2] then
  redis.call('HDEL', KEYS[1], ARGV[1])
end
local lease = redis.call('HGET', KEYS[2], ARGV[2])
if lease then
  redis.call('HSET', KEYS[2], ARGV[2], struct.pack('<dB', 0, 0) .. string.sub(lease, 10))
end
return 'OK'
