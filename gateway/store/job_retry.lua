-- ARGV  id. Queues a job that failed or was cancelled as if it were accepted now; attempts are counted on, so that its
-- former workers stay out. It expires no more. Returns the job, briefly, or nothing.

local job = load(ARGV[OWN_ARGUMENTS])

if job and has_failed(job) then
    local name = key('job', job.id)
    redis.call('ZREM', key('ended'), ended_as(job))
    redis.call('PERSIST', name)
    redis.call('DEL', key('chunks', job.id))
    local bytes = redis.call('HSTRLEN', name, 'body') + redis.call('HSTRLEN', name, 'facts')
    charge(job.owner, 1, bytes - job.bytes)
    redis.call('HDEL', name, 'expires', 'started', 'ended', 'worker', 'returned', 'setback', unpack(ERROR))
    set(job, {bytes = bytes, chunks = 0, failures = 0, created = now})
    queue(job, true, 0)
end
return show(ARGV[OWN_ARGUMENTS], true)
