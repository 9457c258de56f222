-- ARGV  id, token of its claim, status, how many chunks its answer has, then code, message and parameter of an error.
-- Returns whether the claim has ended the job; -1 if there are fewer chunks.

local id, token, status, chunks, code, message, param = unpack(ARGV, OWN_ARGUMENTS)
local job = load(id)

if holds(job, token) then
    if tonumber(job.chunks) < tonumber(chunks) then
        return -1
    end
    end_job(job, status, code, message, param)
    return 1
end
-- It has ended so already: the reply to that was lost.
return is_last(job, token) and job.status == status and job.error_code == code and 1 or 0
