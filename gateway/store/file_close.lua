-- ARGV  id, owner, purpose, how long it is kept in ms. Returns the file, or nothing if it is gone.

local id, owner, purpose, keep = unpack(ARGV, OWN_ARGUMENTS)

if redis.call('HGET', key('file', id), 'state') == 'open' then
    redis.call('HSET', key('file', id), 'purpose', purpose)
    close_file(id, owner, keep)
end
return show_file(id)
