-- ARGV  id, fence, last line, lease in ms, how many lines at most.
-- Returns status, whether its time is over, ms it has left, how many lines are jobs, and of those that have ended
-- id and "number custom_id" by turns; nothing if another has the batch.

local id, fence, last, lease, most = unpack(ARGV, OWN_ARGUMENTS)

insist(TAG)
if not holds_batch(id, fence, last, lease) then
    return false
end
local batch = redis.call('HMGET', key('batch', id), 'status', 'expires')
local found = {
    batch[1], tonumber(batch[2]) <= now and 1 or 0, string.format('%.0f', batch[2] - now),
    redis.call('HLEN', key('lines', id))
}
for _, job in ipairs(redis.call('LRANGE', key('done', id), 0, most - 1)) do
    found[#found + 1] = job
    found[#found + 1] = redis.call('HGET', key('lines', id), job) or ''
end
return found
