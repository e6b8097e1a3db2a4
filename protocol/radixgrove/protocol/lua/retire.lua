-- Takes away what a service without any generation still has, its name among the services too.
-- KEYS: services, leases, then every other key of the service
-- ARGV: service
-- Returns 1 when the service is gone, 0 when it has generations.
if redis.call('HLEN', KEYS[2]) > 0 then return 0 end
redis.call('SREM', KEYS[1], ARGV[1])
redis.call('UNLINK', unpack(KEYS, 2))
return 1
