-- Chooses the replica with the lowest cost, and books the request there.
--
-- time = load + tokens not cached × ms a token + tokens cached on the host × ms a host token:
--        the estimated time to the first token
-- load = queued prefill + rest of the running prefill + requests in flight × 16 tokens, in ms
-- cost = time - credit; credit = min(9 × time saved by the cache, 250 ms)
--
-- The credit is what a hit is worth beyond this request: whoever comes behind waits less, and no
-- second copy displaces other prefixes. In replays of a conversation trace a total factor of 2 gave
-- the lowest mean time to the first token, 10 gave 5 % more hits for 8 % more of that mean and 3 % of
-- its 99th percentile. The bound keeps a hot prefix from holding its clients back: beyond it, queueing
-- costs what it costs.
--
-- Search: replicas by load (random within equal load); for each, the smallest matched depth that
-- would beat the best so far; one probe there; bisect upwards only on success; stop when load alone
-- loses. The bisect is sound because gpu, and gpu ∪ host, are closed under "parent of".
--
-- Bursts: the chosen replica is recorded as pending holder of the path, at the depths 1, 2, 3, 4, 6,
-- 8, 12, 16, … and its end, until about the end of its prefill; a later request that shares the
-- prefix finds it there although no replica has published it yet.
--
-- KEYS: leases, reserved, pending (even epochs), pending (odd epochs), routers,
--       then for each candidate: gpu set, host set, load
-- ARGV: msgpack of the candidates {generation, ms a token, ms a host token or 0, max running or 0,
--       1 if its blocks are named as in `members`}…,
--       packed members of the prompt's blocks, router id, reservation id, prompt tokens,
--       tokens a block, requests (sequences) to book, random seed, ceiling ms, a router's lease in ms
-- Returns {index of the candidate from 1, matched blocks, of which host blocks, tokens booked,
--          time ms, load ms}; {0, leases on record} when no candidate is alive; {-1} when no cost is below the ceiling.
local DECODE_TOKENS = 16 -- a running request delays a prefill about as much as these many tokens
local CREDIT, MOST_CREDIT_MS = 9, 250
local EPOCH_MS = 10000 -- longest life of a pending record; two keys take turns and expire
local SLACK_MS = 250 -- from the end of a prefill to its events
local HOLDERS = 4 -- pending holders kept of one path
local GENERATION = 16 -- characters

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local candidates = cmsgpack.unpack(ARGV[1])
local members, me, id = ARGV[2], ARGV[3], ARGV[4]
local tokens, block, sequences = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local ceiling = tonumber(ARGV[9])
local depth = #members / 8
math.randomseed(tonumber(ARGV[8]))

local function member(d) return string.sub(members, d * 8 - 7, d * 8) end

-- ---- load ------------------------------------------------------------------------------------
local live_router = {}
for _, router in ipairs(redis.call('ZRANGEBYSCORE', KEYS[5], now, '+inf')) do
  live_router[router] = true
end
if not live_router[me] then
  -- Before its first heartbeat: what it books counts for others at once, and ends with it.
  redis.call('ZADD', KEYS[5], now + tonumber(ARGV[10]), me)
  live_router[me] = true
end

local generations, slot = {}, {}
for i, candidate in ipairs(candidates) do
  generations[i], slot[candidate[1]] = candidate[1], i
  -- Where bringing back is no faster than computing, the worker computes: as without a host tier.
  if candidate[3] >= candidate[2] then candidate[3] = 0 end
end
local leases = redis.call('HMGET', KEYS[1], unpack(generations))

local function load_ms(i, running, waiting, waiting_tokens)
  local candidate = candidates[i]
  local ms = candidate[2]
  local fields = redis.call('HGETALL', KEYS[5 + 3 * i])
  local in_flight, queued, busy = 0, 0, 0
  for f = 1, #fields, 2 do
    if fields[f] == '@busy' then
      busy = math.max(0, fields[f + 1] - now)
    elseif live_router[fields[f]] then
      local r, t = string.match(fields[f + 1], '(%d+) (%d+)')
      in_flight, queued = in_flight + r, queued + t
    end
  end
  -- What routers booked and what the replica reports overlap; neither alone is complete.
  in_flight, queued = math.max(in_flight, running + waiting), math.max(queued, waiting_tokens)
  local load = queued * ms + busy + in_flight * DECODE_TOKENS * ms
  if candidate[4] > 0 and in_flight >= candidate[4] then
    -- A full batch: the request waits for others to finish, not only for their prefill.
    load = load + 1000 * (in_flight - candidate[4] + 1) / candidate[4] + 100
  end
  return load
end

local load, order, tie, on_record = {}, {}, {}, 0
for i = 1, #candidates do
  if leases[i] then
    on_record = on_record + 1
    local expires, state, running, waiting, waiting_tokens = struct.unpack('<dBI4I4I4', leases[i])
    if expires > now and state == 1 then
      load[i] = load_ms(i, running, waiting, waiting_tokens)
      order[#order + 1], tie[i] = i, math.random()
    end
  end
end
if #order == 0 then return {0, on_record} end
table.sort(order, function(a, b)
  if load[a] ~= load[b] then return load[a] < load[b] end
  return tie[a] < tie[b]
end)

-- ---- pending holders ---------------------------------------------------------------------------
local epoch = math.floor(now / EPOCH_MS)
local pending_now = KEYS[3 + epoch % 2]
local checkpoints, names, held = {}, {}, {}
local step = 1
while step <= depth do
  checkpoints[#checkpoints + 1] = step
  if step > 1 and step * 1.5 <= depth then checkpoints[#checkpoints + 1] = step * 1.5 end
  step = step * 2
end
if depth > 0 and checkpoints[#checkpoints] ~= depth then checkpoints[#checkpoints + 1] = depth end
for c, d in ipairs(checkpoints) do names[c] = member(d) end

local pending = {} -- candidate → deepest checkpoint it is computing
if #names > 0 then
  for key = 3, 4 do
    local records = redis.call('HMGET', KEYS[key], unpack(names))
    for c, record in ipairs(records) do
      if record then
        if KEYS[key] == pending_now then held[c] = record end
        for at = 1, #record, GENERATION + 8 do
          local i = slot[string.sub(record, at, at + GENERATION - 1)]
          if i and struct.unpack('<d', record, at + GENERATION) > now then
            pending[i] = math.max(pending[i] or 0, checkpoints[c])
          end
        end
      end
    end
  end
end

-- ---- search ------------------------------------------------------------------------------------
local function on_gpu(i, d) return redis.call('SISMEMBER', KEYS[3 + 3 * i], member(d)) == 1 end
local function anywhere(i, d)
  return on_gpu(i, d)
    or (candidates[i][3] > 0 and redis.call('SISMEMBER', KEYS[4 + 3 * i], member(d)) == 1)
end

-- Largest d in low..high with holds(i, d), given holds(i, low) (or low = 0).
local function bisect(i, low, high, holds)
  while low < high do
    local middle = math.ceil((low + high) / 2)
    if holds(i, middle) then low = middle else high = middle - 1 end
  end
  return low
end

local function cost_of(i, saved)
  return load[i] + tokens * candidates[i][2] - saved - math.min(CREDIT * saved, MOST_CREDIT_MS)
end

-- How much time must be saved to make up for `lead`, inverting saved + credit.
local function saved_to_make_up(lead)
  if lead < (CREDIT + 1) * MOST_CREDIT_MS / CREDIT then return lead / (CREDIT + 1) end
  return lead - MOST_CREDIT_MS
end

local best, best_cost, best_saved = nil, math.huge, 0
local matched, host = 0, 0
for _, i in ipairs(order) do
  local saved = (pending[i] or 0) * block * candidates[i][2]
  local cost = cost_of(i, saved)
  if cost < best_cost then
    best, best_cost, best_saved, matched = i, cost, saved, pending[i] or 0
  end
end
for _, i in ipairs(order) do
  if load[i] - MOST_CREDIT_MS >= best_cost then break end
  local ms, host_ms = candidates[i][2], candidates[i][3]
  local saved = saved_to_make_up(load[i] + tokens * ms - best_cost)
  local needed = math.max(math.floor(saved / (block * ms)) + 1, (pending[i] or 0) + 1)
  if needed <= depth and candidates[i][5] == 1 and anywhere(i, needed) then
    local all = bisect(i, needed, depth, anywhere)
    local gpu = all
    if host_ms > 0 then gpu = math.max(bisect(i, 0, all, on_gpu), pending[i] or 0) end
    saved = block * (all * ms - (all - gpu) * host_ms)
    local cost = cost_of(i, saved)
    if cost < best_cost then
      best, best_cost, best_saved, matched, host = i, cost, saved, all, all - gpu
    end
  end
end
if best_cost >= ceiling then return {-1} end

-- ---- reservation -------------------------------------------------------------------------------
local generation = generations[best]
local ms = candidates[best][2]
local work_ms = tokens * ms - best_saved
local booked = math.max(0, math.ceil(work_ms / ms - 1e-6))
local mine = redis.call('HGET', KEYS[5 + 3 * best], me)
local r, t = 0, 0
if mine then r, t = string.match(mine, '(%d+) (%d+)') end
redis.call('HSET', KEYS[5 + 3 * best], me,
  string.format('%.0f %.0f', r + sequences, t + booked))
redis.call('HSET', KEYS[2], id,
  string.format('%s %.0f %s %.0f %.0f', me, booked, generation, sequences, now))

if candidates[best][5] == 1 then
  local until_ms = now + math.min(load[best] + work_ms + SLACK_MS, EPOCH_MS)
  local record = generation .. struct.pack('<d', until_ms)
  local writes = {}
  for c, d in ipairs(checkpoints) do
    if d > matched then
      local kept = {record}
      local old = held[c] or ''
      for at = 1, #old, #record do
        local other = string.sub(old, at, at + #record - 1)
        if #kept < HOLDERS and string.sub(other, 1, GENERATION) ~= generation
          and struct.unpack('<d', other, GENERATION + 1) > now then
          kept[#kept + 1] = other
        end
      end
      writes[#writes + 1] = names[c]
      writes[#writes + 1] = table.concat(kept)
    end
  end
  if #writes > 0 then
    redis.call('HSET', pending_now, unpack(writes))
    redis.call('PEXPIREAT', pending_now, (epoch + 2) * EPOCH_MS)
  end
end
return {best, matched, host, booked, string.format('%.3f', load[best] + work_ms),
  string.format('%.3f', load[best])}
