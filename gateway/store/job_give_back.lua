-- ARGV  id, attempt, token of its claim, ms to rest, how many failures it adds.
-- Returns whether the attempt has given it back.

local id, attempt, token, rest_ms, failures = unpack(ARGV, OWN_ARGUMENTS)
local job = load(id)

if holds(job, attempt, token) then
    leave(job)
    set(job, {failures = job.failures + failures, returned = attempt})
    queue(job, 'again', now + rest_ms)
    return 1
end
-- It was given back already: the reply to that was lost.
return is_last(job, attempt, token) and job.status == 'queued' and job.returned == attempt and 1 or 0
