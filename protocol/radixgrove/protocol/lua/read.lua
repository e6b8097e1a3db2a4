-- Fields and values of hashes, but for those that are longer than anything of ours.
-- KEYS: hashes
-- ARGV: bytes of one hash that are returned at most, bytes of one field with its value
-- Returns TIME, how many fields were left out, and of each hash field, value, …
local answer, left = {redis.call('TIME'), 0}, 0
for _, key in ipairs(KEYS) do
  local all = redis.pcall('HGETALL', key)
  if all.err then return all end
  local room, kept = tonumber(ARGV[1]), {}
  for i = 1, #all, 2 do
    local size = #all[i] + #all[i + 1]
    if size <= room and size <= tonumber(ARGV[2]) then
      room = room - size
      kept[#kept + 1] = all[i]
      kept[#kept + 1] = all[i + 1]
    else
      left = left + 1
    end
  end
  answer[#answer + 1] = kept
end
answer[2] = left
return answer
