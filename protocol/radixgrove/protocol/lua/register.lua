-- A replica joins its service under a new generation; the one before it is hidden at once.
-- KEYS: identity, replicas, leases
-- ARGV: replica id, generation, registration (JSON), identity (JSON), lease ms, load report, state
-- Returns {'OK'} or {'MISMATCH', identity of a living replica}.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function alive(generation)
  local lease = redis.call('HGET', KEYS[3], generation)
  return lease and #lease >= 8 and struct.unpack('<d', lease) > now
end

local own, identity = cjson.decode(ARGV[3]), cjson.decode(ARGV[4])

-- Replicas of another weight version belong to a rollout, whatever it changes.
local function is_bound_by(other)
  return (other.weight_version or '0') == (own.weight_version or '0')
end

local function identity_of(other)
  local theirs = {}
  for field in pairs(identity) do theirs[field] = other[field] end
  theirs.model = type(other.models) == 'table' and other.models[1] or nil
  return theirs
end

local function differs(theirs)
  for field, value in pairs(theirs) do
    if value ~= identity[field] then return true end
  end
  return false
end

-- The members of a group live and die together: what is left of its own last start is no other.
local group = own.group or ARGV[1]
local replicas = redis.call('HGETALL', KEYS[2])
for i = 1, #replicas, 2 do
  local other = registration(replicas[i + 1])
  if (other.group or replicas[i]) ~= group and alive(other.generation) and is_bound_by(other) then
    local theirs = identity_of(other)
    if differs(theirs) then return {'MISMATCH', cjson.encode(theirs)} end
  end
end
redis.call('SET', KEYS[1], ARGV[4])

local previous = redis.call('HGET', KEYS[2], ARGV[1])
if previous then
  local generation = registration(previous).generation
  if redis.call('HEXISTS', KEYS[3], generation) == 1 then
    -- Expiry 0 marks a generation that was replaced or left; the janitor takes its keys.
    redis.call('HSET', KEYS[3], generation, struct.pack('<dB', 0, 0) .. ARGV[6])
  end
end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
redis.call('HSET', KEYS[3], ARGV[2], struct.pack('<dB', now + ARGV[5], tonumber(ARGV[7])) .. ARGV[6])
return {'OK'}
