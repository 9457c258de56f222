-- ARGV  id, fence, last line, lease in ms, the status it has, the one it gets, how long it is kept once it is final in
--       ms, then total and errors, or nothing.
-- Returns 1, or 0 if it has another status; nothing if another has the batch. One with lines that are jobs does
-- not become final.

local id, fence, last, lease, from, to, keep, total, errors = unpack(ARGV, OWN_ARGUMENTS)

insist(TAG)
if not holds_batch(id, fence, last, lease) then
    -- It has ended so already: the reply to that was lost.
    local batch = redis.call('HMGET', key('batch', id), 'fence', 'status')
    return FINAL[to] and batch[1] == fence and batch[2] == to and 1
end
local status = redis.call('HGET', key('batch', id), 'status')
if status == to then
    return 1
end
if status ~= from or (FINAL[to] and redis.call('EXISTS', key('lines', id)) == 1) then
    return 0
end
if total then
    redis.call('HSET', key('batch', id), 'total', total, 'errors', errors)
end
if FINAL[to] then
    end_batch(id, to, keep)
else
    move_batch(id, to)
end
return 1
