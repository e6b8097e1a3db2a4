-- One batch of changes to a generation's prefix tree, applied whole or not at all.
-- Within a batch parents are added before and removed after their children, so that the GPU set is
-- closed under "parent of" at every moment.
-- KEYS: leases, sequences, gpu set, host set
-- ARGV: generation, sequence before, sequence after, then pairs: '+gpu' '-gpu' '+host' '-host',
--       packed members
-- Returns 'OK', 'RESYNC' (a gap: send a snapshot) or 'UNKNOWN' (register again).
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 'UNKNOWN' end
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 'RESYNC' end
for i = 4, #ARGV, 2 do
  local key = string.sub(ARGV[i], 2) == 'gpu' and KEYS[3] or KEYS[4]
  local command = string.sub(ARGV[i], 1, 1) == '+' and 'SADD' or 'SREM'
  local packed, batch = ARGV[i + 1], {}
  for at = 1, #packed, 8 do batch[#batch + 1] = string.sub(packed, at, at + 7) end
  redis.call(command, key, unpack(batch))
end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
return 'OK'
