-- ARGV  'files' or 'batches', owner, id behind which to go on or '', 'asc' or 'desc', how many at most.
-- Returns ids in the order in which they were begun; nothing where there is no such id to go on behind,
-- nor was a short while ago.

local kind, owner, after, order, most = unpack(ARGV, OWN_ARGUMENTS)
local index = key(kind, owner)
local from = order == 'asc' and '-inf' or '+inf'

if after ~= '' then
    local place = redis.call('ZSCORE', index, after) or redis.call('GET', key('listed', kind, owner, after))
    if not place then
        return false
    end
    from = '(' .. place
end
if order == 'asc' then
    return redis.call('ZRANGEBYSCORE', index, from, '+inf', 'LIMIT', 0, most)
end
return redis.call('ZREVRANGEBYSCORE', index, from, '-inf', 'LIMIT', 0, most)
