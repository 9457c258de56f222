-- ARGV  id, token of its claim, configuration of the worker that refuses it, ms to rest, failures after which a
--       job is given up, code, message and parameter of the error.
-- Returns 'left' to others, who may run it, at no cost; else 'failed', or 'ended' where it was the last try; nothing where
-- the claim does not hold the job.

local id, token, config, rest_ms, attempts_max, code, message, param = unpack(ARGV, OWN_ARGUMENTS)
local job = load(id)

insist(TAG)
if holds(job, token) then
    local name = key('refused', job.lane)
    local refused = redis.call('HGET', name, id) or ' '
    if not string.find(refused, ' ' .. config .. ' ', 1, true) then
        refused = refused .. config .. ' '
    end
    local is_left = may_be_run(configs_of(job.lane), refused)
    if not is_left and job.failures + 1 >= tonumber(attempts_max) then
        end_job(job, 'failed', code, message, param)
        return 'ended'
    end
    leave(job)
    redis.call('HSET', name, id, refused)
    redis.call('PEXPIRE', name, REFUSED_MS)
    set(job, {failures = job.failures + (is_left and 0 or 1), returned = job.attempt, setback = message})
    queue(job, false, is_left and 0 or now + rest_ms)
    return is_left and 'left' or 'failed'
end
-- It was done already: the reply to that was lost.
if is_last(job, token) and job.status == 'queued' and job.returned == job.attempt then
    return redis.call('ZSCORE', key('waiting', job.lane), id) and 'left' or 'failed'
end
return is_last(job, token) and job.status == 'failed' and job.error_code == code and 'ended'
