-- ARGV  id, attempt, token of its claim, ms to rest, how many failures it adds, after how many the job is given up or ''.
-- Returns whether the attempt has given it back.

local id, attempt, token, rest_ms, failures, attempts_max = unpack(ARGV, OWN_ARGUMENTS)
local job = load(id)

if holds(job, attempt, token) then
    insist(TAG)
    set(job, {failures = job.failures + failures, returned = attempt})
    if failures ~= '0' and attempts_max ~= '' and tonumber(job.failures) >= tonumber(attempts_max) then
        poison(job)
        return 1
    end
    leave(job)
    queue(job, 'again', now + rest_ms)
    return 1
end
-- It was given back already: the reply to that was lost.
local is_back = is_last(job, attempt, token) and job.returned == attempt
return is_back and (job.status == 'queued' or job.error_code == 'job_poisoned') and 1 or 0
