-- ARGV  id. Returns whether there was such a job.

local job = load(ARGV[OWN_ARGUMENTS])

if not job then
    return 0
end
if not is_final(job) then
    stop(job)
    end_job(job, 'cancelled')
end
redis.call('ZREM', key('ended'), ended_as(job))
forget(job.id, job.bytes, job.owner)
tell(job)
return 1
