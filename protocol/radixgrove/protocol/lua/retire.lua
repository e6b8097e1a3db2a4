-- Takes away what a service without any generation still has, its name among the services too.
-- KEYS: leases, every other key of the service, then, where the caller may change them, the services
-- ARGV: service, how many of the keys are the service's
-- Returns 1 when the service is gone, 0 when it has generations.
if redis.call('HLEN', KEYS[1]) > 0 then return 0 end
local own = tonumber(ARGV[2])
-- A key of another type there keeps nothing of this service.
if KEYS[own + 1] then redis.pcall('SREM', KEYS[own + 1], ARGV[1]) end
redis.call('UNLINK', unpack(KEYS, 1, own))
return 1
