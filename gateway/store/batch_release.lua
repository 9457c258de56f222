-- ARGV  id, fence. Lets another take the batch at once.

local id, fence = unpack(ARGV, OWN_ARGUMENTS)

insist(TAG)
if redis.call('HGET', key('batch', id), 'fence') == fence then
    redis.call('HSET', key('batch', id), 'until', 0)
end
return 1
