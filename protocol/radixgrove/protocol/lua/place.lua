-- Chooses the replica with the lowest cost, and books the request there.
--
-- time = load + tokens not cached × ms a token + tokens cached on the host × ms a host token:
--        the estimated time to the first token
-- load = queued prefill + rest of the running prefill + requests in flight × decode tokens
--        + the wait for a row of a full batch, all in ms
-- cost = time - credit; credit = min(hit credit × time saved by the cache, most credit)
--
-- The credit is what a hit is worth beyond this request: those behind it wait less, and no
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
-- ARGV: msgpack of the facts, lists by candidate: `generation`, `token_ms`, `host_token_ms` (0 without
--       a host tier), `max_running` (0: unknown), `indexed` (its blocks are named as in `members`);
--       and `decode_tokens`, `hit_credit`, `most_credit_ms` (router/costs.py),
--       packed members of the prompt's blocks, router id, reservation id, prompt tokens,
--       tokens a block, requests (sequences) to book, random seed, ceiling ms, a router's lease in ms,
--       and for each other prompt of the request: packed members, how many of them a prompt before
--       has too; the request's tokens are those that it has to compute at most
-- Returns {index of the candidate from 1, matched blocks, of which host blocks, tokens booked,
--          time ms, load ms}; {-1} when no cost is below the ceiling; {0, how many} when no candidate
--          may be chosen, and of how many a lease says so: it runs, or was ended. One that only ran
--          out does not while the caller cannot tell why.
local EPOCH_MS = 10000 -- longest life of a pending record; two keys take turns and expire
local SLACK_MS = 250 -- from the end of a prefill to its events
local HOLDERS = 4 -- pending holders kept of one path
local GENERATION = 16 -- characters
-- A full batch: assumed, not measured. Its rows are taken to become free one after another over
-- a second, and 100 ms more keep requests away from it while another replica has a row.
local BATCH_TURN_MS = 1000
local NO_ROW_MS = 100
local LONGEST_LEASE_MS = 120000 -- one that runs longer was given before the clock was set back

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local facts = cmsgpack.unpack(ARGV[1])
local generation, token_ms, host_token_ms = facts.generation, facts.token_ms, facts.host_token_ms
local max_running, indexed = facts.max_running, facts.indexed
local me, id = ARGV[3], ARGV[4]
local tokens, block, sequences = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local ceiling = tonumber(ARGV[9])
math.randomseed(tonumber(ARGV[8]))

-- One path of blocks for each prompt.
local paths = {{members = ARGV[2], shared = 0}}
for i = 11, #ARGV, 2 do
  paths[#paths + 1] = {members = ARGV[i], shared = tonumber(ARGV[i + 1])}
end
local function member(path, d) return string.sub(path.members, d * 8 - 7, d * 8) end

-- ---- load ------------------------------------------------------------------------------------
local live_router = {}
for _, router in ipairs(redis.call('ZRANGEBYSCORE', KEYS[5], now, now + LONGEST_LEASE_MS)) do
  live_router[router] = true
end
if not live_router[me] then
  -- Before its first heartbeat: what it books counts for others at once, and ends with it.
  redis.call('ZADD', KEYS[5], now + tonumber(ARGV[10]), me)
  redis.call('PEXPIRE', KEYS[5], 60000) -- as router_heartbeat.lua does
  live_router[me] = true
end

local slot = {}
for i, name in ipairs(generation) do
  slot[name] = i
end
local leases = redis.call('HMGET', KEYS[1], unpack(generation))

local function load_ms(i, running, waiting, waiting_tokens)
  local fields = redis.call('HGETALL', KEYS[5 + 3 * i])
  local in_flight, queued, busy = 0, 0, 0
  for f = 1, #fields, 2 do
    if fields[f] == '@busy' then
      busy = math.max(0, fields[f + 1] - now)
    elseif fields[f] == '@ms' then
      token_ms[i] = tonumber(fields[f + 1]) -- measured, where the caller's was registered
    elseif live_router[fields[f]] then
      local r, t = string.match(fields[f + 1], '(%d+) (%d+)')
      in_flight, queued = in_flight + r, queued + t
    end
  end
  local ms = token_ms[i]
  -- Where bringing back is no faster than computing, the worker computes: as without a host tier.
  if host_token_ms[i] >= ms then host_token_ms[i] = 0 end
  -- What routers booked and what the replica reports overlap; neither alone is complete.
  in_flight, queued = math.max(in_flight, running + waiting), math.max(queued, waiting_tokens)
  local load = queued * ms + busy + in_flight * facts.decode_tokens * ms
  local most = max_running[i]
  if most > 0 and in_flight >= most then
    -- The request waits until so many others have finished, not only for their prefill.
    local ahead = in_flight - most + 1
    load = load + BATCH_TURN_MS * ahead / most + NO_ROW_MS
  end
  return load
end

local load, order, tie, proven = {}, {}, {}, 0
for i = 1, #generation do
  if leases[i] then
    local expires, state, running, waiting, waiting_tokens = struct.unpack('<dBI4I4I4', leases[i])
    local runs = expires > now and expires <= now + LONGEST_LEASE_MS
    if expires == 0 or runs then proven = proven + 1 end
    if runs and state == 1 then
      load[i] = load_ms(i, running, waiting, waiting_tokens)
      order[#order + 1], tie[i] = i, math.random()
    end
  end
end
if #order == 0 then return {0, proven} end
table.sort(order, function(a, b)
  if load[a] ~= load[b] then return load[a] < load[b] end
  return tie[a] < tie[b]
end)

-- ---- pending holders ---------------------------------------------------------------------------
local epoch = math.floor(now / EPOCH_MS)
local pending_now = KEYS[3 + epoch % 2]

local function add_checkpoints(path)
  local depth, step = #path.members / 8, 1
  local checkpoints, names = {}, {}
  while step <= depth do
    checkpoints[#checkpoints + 1] = step
    if step > 1 and step * 1.5 <= depth then checkpoints[#checkpoints + 1] = step * 1.5 end
    step = step * 2
  end
  if depth > 0 and checkpoints[#checkpoints] ~= depth then checkpoints[#checkpoints + 1] = depth end
  for c, d in ipairs(checkpoints) do names[c] = member(path, d) end
  path.depth, path.checkpoints, path.names = depth, checkpoints, names
end

-- `pending`: candidate → deepest checkpoint it is computing; `held`: the records of this epoch.
local function look_up_pending(path)
  path.pending, path.held = {}, {}
  if #path.names == 0 then return end
  for key = 3, 4 do
    local records = redis.call('HMGET', KEYS[key], unpack(path.names))
    for c, record in ipairs(records) do
      if record then
        if KEYS[key] == pending_now then path.held[c] = record end
        for at = 1, #record, GENERATION + 8 do
          local i = slot[string.sub(record, at, at + GENERATION - 1)]
          if i and struct.unpack('<d', record, at + GENERATION) > now then
            path.pending[i] = math.max(path.pending[i] or 0, path.checkpoints[c])
          end
        end
      end
    end
  end
end

for _, path in ipairs(paths) do
  add_checkpoints(path)
  look_up_pending(path)
end

-- ---- search ------------------------------------------------------------------------------------
local function on_gpu(i, path, d)
  return redis.call('SISMEMBER', KEYS[3 + 3 * i], member(path, d)) == 1
end
local function anywhere(i, path, d)
  return on_gpu(i, path, d)
    or (host_token_ms[i] > 0 and redis.call('SISMEMBER', KEYS[4 + 3 * i], member(path, d)) == 1)
end

-- Largest d in low..high with holds(i, path, d), given holds(i, path, low) (or low = 0).
local function bisect(i, path, low, high, holds)
  while low < high do
    local middle = math.ceil((low + high) / 2)
    if holds(i, path, middle) then low = middle else high = middle - 1 end
  end
  return low
end

-- The search skips replicas by two bounds on this cost: it is at least load - most credit, which ends
-- the search, and `saved_to_make_up`, its inverse, gives the depth to probe. A term of the replica
-- alone belongs in `load_ms`, which both bounds see. A term here that can lower the cost, or a larger
-- credit, must be in both bounds too, or the search can skip the best replica; a term that only
-- raises the cost need not be.
local function cost_of(i, saved)
  local credit = math.min(facts.hit_credit * saved, facts.most_credit_ms)
  return load[i] + tokens * token_ms[i] - saved - credit
end

-- How much time must be saved to make up for `lead`, inverting saved + credit.
local function saved_to_make_up(lead)
  local credit, most = facts.hit_credit, facts.most_credit_ms
  if lead < (credit + 1) * most / credit then return lead / (credit + 1) end
  return lead - most
end

-- Blocks of a path that a candidate has in either tier, and on the GPU alone; `low` it has for sure.
local function depths(i, path, low)
  local all = bisect(i, path, low, path.depth, anywhere)
  if host_token_ms[i] == 0 then return all, all end
  return all, math.max(bisect(i, path, 0, all, on_gpu), path.pending[i] or 0)
end

local function time_saved(i, all, gpu)
  return block * (all * token_ms[i] - (all - gpu) * host_token_ms[i])
end

local best, best_cost, best_saved = nil, math.huge, 0
local matched, host = 0, 0
local function search_one(path)
  for _, i in ipairs(order) do
    local saved = (path.pending[i] or 0) * block * token_ms[i]
    local cost = cost_of(i, saved)
    if cost < best_cost then
      best, best_cost, best_saved, matched = i, cost, saved, path.pending[i] or 0
    end
  end
  for _, i in ipairs(order) do
    if load[i] - facts.most_credit_ms >= best_cost then break end
    local ms = token_ms[i]
    local saved = saved_to_make_up(load[i] + tokens * ms - best_cost)
    local needed = math.max(math.floor(saved / (block * ms)) + 1, (path.pending[i] or 0) + 1)
    if needed <= path.depth and indexed[i] and anywhere(i, path, needed) then
      local all, gpu = depths(i, path, needed)
      saved = time_saved(i, all, gpu)
      local cost = cost_of(i, saved)
      if cost < best_cost then
        best, best_cost, best_saved, matched, host = i, cost, saved, all, all - gpu
      end
    end
  end
  path.matched = matched
end

-- What prompts have in common counts once.
local function search_all()
  for _, i in ipairs(order) do
    if load[i] - facts.most_credit_ms >= best_cost then break end
    local all, gpu, found = 0, 0, {}
    for p, path in ipairs(paths) do
      local a = path.pending[i] or 0
      local g = a
      if indexed[i] then
        a, g = depths(i, path, 0)
        a = math.max(a, path.pending[i] or 0)
        if host_token_ms[i] == 0 then g = a end
      end
      found[p] = a
      all = all + math.max(0, a - path.shared)
      gpu = gpu + math.max(0, g - path.shared)
    end
    local saved = time_saved(i, all, gpu)
    local cost = cost_of(i, saved)
    if cost < best_cost then
      best, best_cost, best_saved, matched, host = i, cost, saved, all, all - gpu
      for p, path in ipairs(paths) do path.matched = found[p] end
    end
  end
end

if #paths == 1 then search_one(paths[1]) else search_all() end
if best_cost >= ceiling then return {-1} end

-- ---- reservation -------------------------------------------------------------------------------
local chosen, ms = generation[best], token_ms[best]
local work_ms = tokens * ms - best_saved
local booked = math.max(0, math.ceil(work_ms / ms - 1e-6))
local mine = redis.call('HGET', KEYS[5 + 3 * best], me)
local r, t = 0, 0
if mine then r, t = string.match(mine, '(%d+) (%d+)') end
redis.call('HSET', KEYS[5 + 3 * best], me,
  string.format('%.0f %.0f', r + sequences, t + booked))
redis.call('HSET', KEYS[2], id,
  string.format('%s %.0f %s %.0f %.0f', me, booked, chosen, sequences, now))

if indexed[best] then
  local until_ms = now + math.min(load[best] + work_ms + SLACK_MS, EPOCH_MS)
  local record = chosen .. struct.pack('<d', until_ms)
  local writes = {}
  for _, path in ipairs(paths) do
    for c, d in ipairs(path.checkpoints) do
      if d > math.max(path.matched, path.shared) then
        local kept = {record}
        local old = path.held[c] or ''
        for at = 1, #old, #record do
          local other = string.sub(old, at, at + #record - 1)
          if #kept < HOLDERS and string.sub(other, 1, GENERATION) ~= chosen
            and struct.unpack('<d', other, GENERATION + 1) > now then
            kept[#kept + 1] = other
          end
        end
        writes[#writes + 1] = path.names[c]
        writes[#writes + 1] = table.concat(kept)
      end
    end
  end
  if #writes > 0 then
    redis.call('HSET', pending_now, unpack(writes))
    redis.call('PEXPIREAT', pending_now, (epoch + 2) * EPOCH_MS)
  end
end
return {best, matched, host, booked, string.format('%.3f', load[best] + work_ms),
  string.format('%.3f', load[best])}
