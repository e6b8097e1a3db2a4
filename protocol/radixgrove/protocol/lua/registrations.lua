-- Before the scripts that read registrations: others wrote them, and one may make no sense.
local function registration(text)
  local readable, fields = pcall(cjson.decode, text or '')
  if not readable or type(fields) ~= 'table' then fields = {} end
  if type(fields.generation) ~= 'string' then fields.generation = '' end
  return fields
end

