-- ARGV  id, owner, lane, priority, body, facts, keep in ms, ms until it expires or '', the most jobs and
--       bytes of the owner, then digest of the idempotency key or '', fingerprint, how long it is kept in ms;
--       whether the job replaces one accepted under that key that has no answer and will not get one.
-- Returns the job, briefly: this one, or the one accepted before it; or why it is refused.

local id, owner, lane, priority, body, facts, keep, expires = unpack(ARGV, OWN_ARGUMENTS, OWN_ARGUMENTS + 7)
local jobs_max, bytes_max, digest, fingerprint, promise_ms, replaces = unpack(ARGV, OWN_ARGUMENTS + 8)

sweep()
local before = show(id, true)
if before then
    return before
end
if redis.call('EXISTS', key('revoked', id)) == 1 then
    return 'revoked'
end
local first, is_reused = submitted(digest, fingerprint)
if is_reused then
    return 'idempotency_key_reused'
end
local known = first and load(first)
if known and not (replaces == '1' and has_failed(known)) then
    return show(first, true)
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
    id = id, owner = owner, lane = lane, priority = priority, body = body, facts = facts, keep = keep, batch = ''
}, expires)
return show(id, true)
