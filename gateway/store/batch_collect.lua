-- ARGV  id, fence, last line, lease in ms, job, output or error, id of that file, the line.
-- Writes down what became of a line that was a job, and forgets the job. A job that goes on is left alone; so is one
-- that went on when it was looked at, for which the line is '', and has ended since: it is looked at once more.
-- Returns 1, also if that was done before; nothing if another has the batch.

local id, fence, last, lease, job_id, kind, file, line = unpack(ARGV, OWN_ARGUMENTS)

insist(TAG)
if not holds_batch(id, fence, last, lease) then
    return false
end
redis.call('LREM', key('done', id), 0, job_id)
local job = load(job_id)
if redis.call('HEXISTS', key('lines', id), job_id) == 0 or (job and not is_final(job)) then
    return 1
end
if line == '' then
    redis.call('RPUSH', key('done', id), job_id)
    return 1
end
write_lines(id, kind, file, line)
redis.call('HDEL', key('lines', id), job_id)
redis.call('HINCRBY', key('batch', id), kind == 'output' and 'completed' or 'failed', 1)
if job then
    redis.call('ZREM', key('ended'), ended_as(job))
    forget(job_id, job.bytes, job.owner)
end
return 1
