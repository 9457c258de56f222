-- ARGV  id, token of its claim, ms to rest, how many failures it adds, after how many the job is given up, and what went
--       wrong, or ''.
-- Returns whether the claim has given it back.

local id, token, rest_ms, failures, attempts_max, setback = unpack(ARGV, OWN_ARGUMENTS)
local job = load(id)

if holds(job, token) then
    insist(TAG)
    set(job, {failures = job.failures + failures, returned = job.attempt, setback = setback})
    if failures ~= '0' and tonumber(job.failures) >= tonumber(attempts_max) then
        poison(job)
        return 1
    end
    leave(job)
    queue(job, false, now + rest_ms)
    return 1
end
-- It was given back already: the reply to that was lost.
local is_back = is_last(job, token) and job.returned == job.attempt
return is_back and (job.status == 'queued' or job.error_code == 'job_poisoned') and 1 or 0
