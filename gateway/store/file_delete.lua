-- ARGV  id. Returns 1, or 0 if there is no such file, or -1 if a batch reads it. One that is open is forgotten too.

local id = ARGV[OWN_ARGUMENTS]
local uses = redis.call('HGET', key('file', id), 'uses')

if not uses then
    return 0
end
if tonumber(uses) > 0 then
    return -1
end
forget_file(id)
return 1
