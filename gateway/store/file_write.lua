-- ARGV  id, owner, filename, purpose, where in the file the data begin, the most bytes of the owner, data.
-- Returns 1, also if these data are there already; 0 if the owner would have too many bytes; -1 if the file is
-- gone. The first data make the file.

local id, owner, filename, purpose, at, bytes_max, data = unpack(ARGV, OWN_ARGUMENTS)

sweep_files()
local state, bytes = unpack(redis.call('HMGET', key('file', id), 'state', 'bytes'))
if not state and at ~= '0' then
    return -1
end
if state and tonumber(bytes) ~= tonumber(at) then
    return tonumber(bytes) > tonumber(at) and 1 or -1
end
local costs = #data + (state and 0 or FILE_COSTS)
if tonumber(redis.call('GET', key('filed', owner)) or 0) + costs > tonumber(bytes_max) then
    return 0
end
if not state then
    begin_file(id, owner, filename, purpose)
end
append_to_file(id, owner, data)
redis.call('ZADD', key('files_expiring'), now + OPEN_MS, id)
return 1
