-- ARGV  lease in ms, how many batches of one owner may be worked at.
-- Returns the oldest batch that nobody works at, with fence, cursor and offset behind it; or nothing. One that only
-- has to be ended, since it was cancelled or its time is over, may be worked at in addition.

local lease, each_max = unpack(ARGV, OWN_ARGUMENTS)
local LOOKED_MAX = 10000
local counts, first = {}, nil

insist(TAG)
sweep_files()
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('batches_ended'), '-inf', now, 'LIMIT', 0, SWEPT_MAX)) do
    forget_batch(id)
end
local open = redis.call('ZRANGE', key('batches_open'), 0, LOOKED_MAX - 1)
local free = {}
for _, id in ipairs(open) do
    local batch = redis.call('HMGET', key('batch', id), 'owner', 'until', 'status', 'expires')
    local owner, taken_until = batch[1], batch[2]
    if not owner then -- deleted by hand
        redis.call('ZREM', key('batches_open'), id)
    elseif tonumber(taken_until) > now then
        if tonumber(taken_until) > now + lease then -- this server's clock has gone back
            redis.call('HSET', key('batch', id), 'until', now + lease)
        end
        counts[owner] = (counts[owner] or 0) + 1
    else
        free[#free + 1] = {id, owner, batch[3] == 'cancelling' or tonumber(batch[4]) <= now}
    end
end
for _, one in ipairs(free) do
    if not first and (one[3] or (counts[one[2]] or 0) < tonumber(each_max)) then
        first = one[1]
    end
end
if not first then
    return false
end
local fence = redis.call('HINCRBY', key('batch', first), 'fence', 1)
redis.call('HSET', key('batch', first), 'until', now + lease)
local place = redis.call('HMGET', key('batch', first), 'cursor', 'offset')
return {show_batch(first), tostring(fence), place[1], place[2]}
