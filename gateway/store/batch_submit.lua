-- ARGV  id, fence, last line, lease in ms, number of the line, where the next begins, custom_id, how many lines of the
--       owner may be jobs at once, how many bytes they may hold, then of the job: id, owner, lane, priority, body,
--       facts, keep in ms, ms until it expires or ''.
-- Returns 1, also if the line was handed over before; 0 if too much of the owner is; nothing if another has the batch.

local id, fence, last, lease, number, offset, custom_id = unpack(ARGV, OWN_ARGUMENTS, OWN_ARGUMENTS + 6)
local jobs_max, bytes_max = unpack(ARGV, OWN_ARGUMENTS + 7, OWN_ARGUMENTS + 8)
local job_id, owner, lane, priority, body, facts, keep, expires = unpack(ARGV, OWN_ARGUMENTS + 9)

if not holds_batch(id, fence, last, lease) then
    return false
end
if tonumber(redis.call('HGET', key('batch', id), 'cursor')) >= tonumber(number) then
    return 1
end
local has = redis.call('HMGET', key('quota', owner), 'jobs', 'bytes')
local jobs, bytes = tonumber(has[1] or 0), tonumber(has[2] or 0)
local is_full = jobs >= tonumber(jobs_max) or redis.call('HLEN', key('lines', id)) >= tonumber(jobs_max)
if is_full or (bytes > 0 and bytes + #body + #facts > tonumber(bytes_max)) then
    return 0
end
redis.call('HSET', key('lines', id), job_id, number .. ' ' .. custom_id)
redis.call('HSET', key('batch', id), 'cursor', number, 'offset', offset)
accept({
    id = job_id, owner = owner, lane = lane, priority = priority, body = body, facts = facts, keep = keep, batch = id
}, expires)
return 1
