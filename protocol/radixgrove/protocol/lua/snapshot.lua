-- A generation's whole prefix tree, in chunks beside the old one, then put in its place at once.
-- KEYS: leases, sequences, gpu set, host set, gpu snapshot, host snapshot
-- ARGV: generation, then 'begin' | 'gpu' or 'host', packed members | 'commit', sequence
-- Returns 'OK' or 'UNKNOWN' (register again).
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 'UNKNOWN' end
if ARGV[2] == 'begin' then
  redis.call('UNLINK', KEYS[5], KEYS[6])
elseif ARGV[2] == 'commit' then
  for tier = 3, 4 do
    -- RENAME would free the old set at once and block; UNLINK leaves that to another thread.
    redis.call('UNLINK', KEYS[tier])
    if redis.call('EXISTS', KEYS[tier + 2]) == 1 then
      redis.call('PERSIST', KEYS[tier + 2])
      redis.call('RENAME', KEYS[tier + 2], KEYS[tier])
    end
  end
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
else
  local key = ARGV[2] == 'gpu' and KEYS[5] or KEYS[6]
  local packed, batch = ARGV[3], {}
  for at = 1, #packed, 8 do batch[#batch + 1] = string.sub(packed, at, at + 7) end
  redis.call('SADD', key, unpack(batch))
  redis.call('PEXPIRE', key, 60000) -- a worker may die before its commit
end
return 'OK'
