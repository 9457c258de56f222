-- ARGV  id, owner, lane, priority, body, facts, keep in ms, ms until it expires or '', batch, the most jobs and
--       bytes of the owner, then digest of the idempotency key or '', fingerprint, how long it is kept in ms.
-- Returns the job, briefly: this one, or the one accepted before it; or why it is refused.

local id, owner, lane, priority, body, facts, keep, expires, batch = unpack(ARGV, OWN_ARGUMENTS, OWN_ARGUMENTS + 8)
local jobs_max, bytes_max, digest, fingerprint, promise_ms = unpack(ARGV, OWN_ARGUMENTS + 9)

sweep()
local before = show(id, true)
if before then
    return before
end
local first, is_reused = submitted(digest, fingerprint)
if is_reused then
    return 'idempotency_key_reused'
end
before = first and show(first, true)
if before then
    return before
end
local bytes = #body + #facts
local has = redis.call('HMGET', key('quota', owner), 'jobs', 'bytes')
if tonumber(has[1] or 0) + 1 > tonumber(jobs_max) then
    return 'too_many_jobs'
end
if tonumber(has[2] or 0) + bytes > tonumber(bytes_max) then
    return 'too_many_bytes'
end
remember_submitted(digest, fingerprint, id, promise_ms)
accept({
    id = id, owner = owner, lane = lane, priority = priority, body = body, facts = facts, keep = keep, batch = batch
}, expires)
return show(id, true)
