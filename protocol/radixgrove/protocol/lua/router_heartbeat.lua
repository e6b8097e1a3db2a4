-- A router renews its lease and overwrites its load with absolute values, so that whatever was
-- released twice or not at all heals within a heartbeat; load of dead routers is dropped. What
-- routers write ends by itself when no router renews it any more.
-- KEYS: routers, reserved, load of each generation…
-- ARGV: router id, lease ms, msgpack of {
--   generations = {generation…} in the order of the load keys,
--   requests = {in flight, for each of them},
--   open = {[reservation id] = {index of the generation, tokens}},
--   unanswered = {reservation ids of placements on their way},
--   compare = whether any other reservation of this router goes: an answer, or the order to release
--             it, was lost with a connection }
-- Returns the ids in `open` that the workers admitted meanwhile.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local me = ARGV[1]
local state = cmsgpack.unpack(ARGV[3])

redis.call('ZADD', KEYS[1], now + ARGV[2], me)
local dead = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)
-- What would live longer than any lease is of before the clock was set back.
for _, router in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], now + 120000, '+inf')) do
  dead[#dead + 1] = router
end

local requests, tokens, index = state.requests, {}, {}
for i, generation in ipairs(state.generations) do
  tokens[i], index[generation] = 0, i
end
local admitted = {}
for id, reservation in pairs(state.open) do
  if redis.call('HEXISTS', KEYS[2], id) == 1 then
    tokens[reservation[1]] = tokens[reservation[1]] + reservation[2]
  else
    admitted[#admitted + 1] = id
  end
end
for _, id in ipairs(state.unanswered) do
  local entry = redis.call('HGET', KEYS[2], id)
  if entry then
    local queued, generation, count = string.match(entry, '^%S+ (%d+) (%S+) (%d+)')
    local i = index[generation]
    if i then
      tokens[i], requests[i] = tokens[i] + queued, requests[i] + count
    end
  end
end

if state.compare then
  local known = {}
  for _, id in ipairs(state.unanswered) do known[id] = true end
  local entries = redis.call('HGETALL', KEYS[2])
  for i = 1, #entries, 2 do
    local id, router = entries[i], string.match(entries[i + 1], '^%S+')
    if router == me and not known[id] and not state.open[id] then
      redis.call('HDEL', KEYS[2], id)
    end
  end
end

for i = 1, #state.generations do
  local key = KEYS[i + 2]
  if requests[i] == 0 and tokens[i] == 0 then
    redis.call('HDEL', key, me)
  else
    redis.call('HSET', key, me, string.format('%.0f %.0f', requests[i], tokens[i]))
  end
  if #dead > 0 then redis.call('HDEL', key, unpack(dead)) end
end
if #dead > 0 then redis.call('ZREM', KEYS[1], unpack(dead)) end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, 60000) end
return admitted
