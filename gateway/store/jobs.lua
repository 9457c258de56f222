-- Shared code of the job scripts; prepended to each of them, after webhooks.lua.
-- Redis 6.2 commands only.
--
-- KEYS  1  tag: prefix of all keys, so that they share a cluster slot; the rest of a name is built here
-- ARGV  1  lost: ms after which a claim without a heartbeat is lost; then the script's own
--
-- job:<id>           HASH    the job
-- chunks:<id>        STREAM  its answer: chunk n is entry 0-(n+1)
-- left:<p>:<lane>    STREAM  claimed jobs of a priority; each is added when it is claimed. The previous version knows it
--                            by this name, as that of refused jobs, and takes over what is lost
-- new:<p>:<lane>, again:<p>:<lane>
--                    STREAM  jobs that the previous version has queued, and are added before they are claimed
-- waiting:<lane>     ZSET    queued jobs that do not rest, in the order of claiming
-- backlog:<p>:<lane>:<owner>
--                    ZSET    those of an owner, by their turns; by these less AGAIN if they were claimed before
-- turns:<lane>       HASH    priority -> the latest turn in which a job was claimed; "priority owner" -> the one after
--                            that of the owner's new job that was claimed last; "again priority owner" -> likewise, of
--                            those that were claimed before
-- refused:<lane>     HASH    id -> " config config ": the configurations under which the job was refused
-- serving:<model>    ZSET    "worker config" of the processes that serve a model, by the time of the announcement
-- resting:<lane>     ZSET    other queued jobs, by the time at which they wait again
-- ages:<lane>        ZSET    queued jobs, by the time of submission
-- ends:<lane>        HASH    time -> number of claimed jobs that ended then
-- lanes              SET     lanes with a job that is not final
-- running            HASH    lane -> number of claimed jobs
-- expiring           ZSET    jobs that are not final, by deadline
-- ended              ZSET    "id bytes owner" of final jobs, by the time of deletion
-- jobs, jobs:<owner> ZSET    jobs in the order of submission
-- quota:<owner>      HASH    number of jobs that are not final, and bytes
-- totals             HASH    "outcome lane": total number of jobs that ended with the outcome
-- drained            STRING  since when an operator has paused the queue
-- arrivals           STRING  a counter of jobs that were accepted, or began to wait
-- clock              HASH    when the store was last used, since when without a break, and when it was swept
-- claimed:<worker>   STRING  "token id" of its latest claim
-- revoked:<id>       STRING  exists if a job that was not accepted yet must not be
-- submitted:<digest> STRING  "fingerprint id" of the job or batch accepted under an idempotency key
-- lines:<batch>, done:<batch>: see batches.lua. The owner of a job that is a line of a batch is "batch:<owner>".
--
-- In each stream, the group `workers` has exactly one pending entry per job in progress. An entry is deleted
-- when its job leaves the stream.

local TAG, LOST, OWN_ARGUMENTS = KEYS[1], tonumber(ARGV[1]), 2
local GROUP, BY_SWEEP = 'workers', '(sweep)'
local PRIORITIES = {'high', 'normal', 'batch'}
local RANK = {high = 0, normal = 1, batch = 2}
local SPAN = 2 ^ 50 -- order numbers per priority; the previous version has the first half for jobs claimed before
local TURN = 2 ^ 16 -- order numbers per turn, in the second half: the first of them for jobs that were claimed before.
-- Of more jobs in one turn, some change places
local AGAIN = 2 ^ 34 -- more than there are turns
local AGAIN_STEP = 1 / 8 -- as many of an owner's jobs that were claimed before go in one turn, and one that was not: these
-- have begun, but no number of them that are returned again and again keeps other owners waiting
local SWEEP_MS = math.min(1000, LOST / 5)
local SWEPT_MAX = 200 -- maximum per kind and sweep; the rest follows in the next script
local BUCKET_MS, LATELY_MS = 10000, 300000 -- for counting ends
local SERVING_MS = 600000 -- expiry of an announcement
local REVOKED_MS = 600000 -- how long a submission may be on its way
local REFUSED_MS = 86400000 -- how long a lane's refusals are remembered after the last one

local STATE = {
    'status', 'lane', 'priority', 'owner', 'attempt', 'failures', 'bytes', 'created', 'keep', 'stream',
    'entry', 'chunks', 'worker', 'token', 'returned', 'setback', 'error_code', 'batch'
}
local SHOWN = {
    'owner', 'lane', 'priority', 'keep', 'expires', 'batch', 'status', 'attempt', 'failures', 'created',
    'started', 'ended', 'retry_at', 'chunks', 'worker', 'setback', 'error_code', 'error_message', 'error_param', 'bytes',
    'token', 'body', 'facts'
}

local ERROR = {'error_code', 'error_message', 'error_param'}

local function key(...)
    return TAG .. ':' .. table.concat({...}, ':')
end

local function load(id)
    local values = redis.call('HMGET', key('job', id), unpack(STATE))
    if not values[1] then
        return nil
    end
    local job = {id = id}
    for i, name in ipairs(STATE) do
        job[name] = values[i] or nil
    end
    return job
end

local function set(job, values)
    local flat = {}
    for name, value in pairs(values) do
        job[name] = value
        flat[#flat + 1], flat[#flat + 2] = name, value
    end
    redis.call('HSET', key('job', job.id), unpack(flat))
end

local function is_final(job)
    return job.status ~= 'queued' and job.status ~= 'in_progress'
end

local function has_failed(job)
    return job.status == 'failed' or job.status == 'cancelled'
end

-- Whether this is the token of the job's latest claim. The number of its attempt may have been that of another claim,
-- which the store has forgotten.
local function is_last(job, token)
    return job and job.token == token
end

-- Whether a claim holds the job.
local function holds(job, token)
    return is_last(job, token) and job.status == 'in_progress'
end

local function tell(job)
    redis.call('PUBLISH', key('changed', job.id), '')
end

-- Notifies the worker that it has lost the job.
local function stop(job)
    redis.call('PUBLISH', key('work'), job.attempt .. ' ' .. job.id)
end

local function charge(owner, jobs, bytes)
    local quota = key('quota', owner)
    jobs = redis.call('HINCRBY', quota, 'jobs', jobs)
    bytes = redis.call('HINCRBY', quota, 'bytes', bytes)
    if jobs <= 0 and bytes <= 0 then
        redis.call('DEL', quota)
    end
end

-- ------------------------------------------------------------------ entering and leaving the queue

local function backlog_of(job)
    return key('backlog', job.priority, job.lane, job.owner)
end

-- Returns the last turn of an owner's jobs that wait, new ones or others, or nothing. An earlier version leaves behind
-- what it claims.
local function last_turn(job, is_new)
    local backlog, least, most = backlog_of(job), is_new and 0 or '-inf', is_new and '+inf' or '(0'
    local last
    for _ = 1, SWEPT_MAX do
        last = redis.call('ZREVRANGEBYSCORE', backlog, most, least, 'WITHSCORES', 'LIMIT', 0, 1)
        if not last[1] or redis.call('ZSCORE', key('waiting', job.lane), last[1]) then
            break
        end
        redis.call('ZREM', backlog, last[1])
    end
    return last[2] and last[2] + (is_new and 0 or AGAIN)
end

local function had_by(job, is_new)
    return (is_new and '' or 'again ') .. job.priority .. ' ' .. job.owner
end

-- Returns the turn of a job that becomes its owner's last new one, or last of the others: a step after that owner's
-- last such job, whether it still waits or was the last to be claimed, but not before the turn that the lane has
-- reached, nor before the jobs of an earlier version, whose order numbers have the number of their arrival.
local function next_turn(job, is_new, arrival)
    local reached = redis.call('HMGET', key('turns', job.lane), job.priority, had_by(job, is_new))
    local last = last_turn(job, is_new) or -1
    local least = math.max(tonumber(reached[1] or 0), math.floor(arrival / TURN))
    return math.max(least, tonumber(reached[2] or 0), last + (is_new and 1 or AGAIN_STEP))
end

-- Notes that a job is claimed in its turn.
local function note_turn(job)
    local score = tonumber(redis.call('ZSCORE', backlog_of(job), job.id) or '')
    if not score then -- an earlier version has queued it
        return
    end
    local turns, is_new = key('turns', job.lane), score >= 0
    local turn = is_new and score or score + AGAIN
    local reached = tonumber(redis.call('HGET', turns, job.priority) or 0)
    local after = turn + (is_new and 1 or AGAIN_STEP)
    redis.call('HSET', turns, job.priority, math.max(math.floor(turn), reached), had_by(job, is_new), after)
end

-- Returns the first order number of a turn, for new jobs or for others.
local function order_of(job, is_new, turn)
    return RANK[job.priority] * SPAN + SPAN / 2 + math.floor(turn) * TURN + (is_new and TURN / 2 or 0)
end

local function enqueue(job, is_new)
    local arrival = redis.call('INCR', key('arrivals'))
    local turn = next_turn(job, is_new, arrival)
    redis.call('ZADD', backlog_of(job), is_new and turn or turn - AGAIN, job.id)
    redis.call('ZADD', key('waiting', job.lane), order_of(job, is_new, turn) + arrival % (TURN / 2), job.id)
    redis.call('PUBLISH', key('work'), '')
end

-- Returns a queued job's position in its lane, from 1; for a resting job, the position it would get now.
local function position(job)
    local rank = redis.call('ZRANK', key('waiting', job.lane), job.id)
    if rank then
        return rank + 1
    end
    local turn = next_turn(job, false, (redis.call('GET', key('arrivals')) or 0) + 1)
    local behind = order_of(job, true, turn)
    return redis.call('ZCOUNT', key('waiting', job.lane), '-inf', '(' .. string.format('%.0f', behind)) + 1
end

-- Returns id, position and the public fields; a brief one lacks body and facts.
local function show(id, is_brief)
    local values = redis.call('HMGET', key('job', id), unpack(SHOWN, 1, is_brief and #SHOWN - 2 or #SHOWN))
    if not values[7] then
        return false
    end
    local owner, lane, priority = unpack(values)
    local place = values[7] == 'queued' and position({id = id, owner = owner, lane = lane, priority = priority})
    return {id, place, unpack(values)}
end

local function queue(job, is_new, retry_at)
    redis.call('SADD', key('lanes'), job.lane)
    redis.call('ZADD', key('ages', job.lane), job.created, job.id)
    set(job, {status = 'queued', retry_at = retry_at > now and retry_at or 0, stream = '', entry = ''})
    if retry_at > now then
        redis.call('ZADD', key('resting', job.lane), retry_at, job.id)
    else
        enqueue(job, is_new)
    end
    tell(job)
end

-- Accepts a job: names and values as in `STATE`, and body, facts, keep; expires in ms or ''.
local function accept(job, expires)
    local bytes = #job.body + #job.facts
    charge(job.owner, 1, bytes)
    set(job, {
        owner = job.owner, lane = job.lane, priority = job.priority, body = job.body, facts = job.facts,
        keep = job.keep, batch = job.batch, attempt = 0, failures = 0, chunks = 0, bytes = bytes, created = now
    })
    if expires ~= '' then
        set(job, {expires = expires})
        redis.call('ZADD', key('expiring'), now + expires, job.id)
    end
    local arrival = redis.call('INCR', key('arrivals'))
    redis.call('ZADD', key('jobs'), arrival, job.id)
    redis.call('ZADD', key('jobs', job.owner), arrival, job.id)
    queue(job, true, 0)
end

local function drop_entry(stream, entry)
    redis.call('XACK', stream, GROUP, entry)
    redis.call('XDEL', stream, entry)
end

-- Creates a stream, or its group alone if that was destroyed by hand: then its entries are pending again, until the next
-- heartbeats of their workers, or as lost.
local function open(stream)
    if redis.call('EXISTS', stream) == 0 or #redis.call('XINFO', 'GROUPS', stream) == 0 then
        redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
        redis.call('XREADGROUP', 'GROUP', GROUP, BY_SWEEP, 'STREAMS', stream, '>')
    end
end

local function put_into_stream(job)
    local stream = key('left', job.priority, job.lane)
    open(stream)
    set(job, {stream = stream, entry = redis.call('XADD', stream, '*', 'job', job.id)})
end

-- Has a stream hand out a job to a worker. Returns whether it did.
local function take(job, worker)
    if job.entry == '' then
        put_into_stream(job)
    end
    local read = redis.pcall('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', 1, 'STREAMS', job.stream, '>')
    local entry = read and not read.err and read[1] and read[1][2][1][1]
    if entry == job.entry then
        return true
    end
    -- Somebody else has written to the stream: the order beside it counts.
    if entry then
        drop_entry(job.stream, entry)
    else
        redis.pcall('XDEL', job.stream, job.entry)
        set(job, {stream = '', entry = ''})
    end
    return false
end

-- Removes a queued job from its lane's order.
local function unqueue(job)
    for _, name in ipairs({'waiting', 'resting', 'ages'}) do
        redis.call('ZREM', key(name, job.lane), job.id)
    end
    redis.call('ZREM', backlog_of(job), job.id)
end

-- Removes a job from its queue, or from its worker.
local function leave(job)
    if job.entry and job.entry ~= '' then
        drop_entry(job.stream, job.entry)
    end
    if job.status == 'queued' then
        unqueue(job)
    else
        redis.call('HINCRBY', key('running'), job.lane, -1)
    end
end

local function close_if_empty(lane)
    local running = tonumber(redis.call('HGET', key('running'), lane) or 0)
    if running > 0 or redis.call('EXISTS', key('ages', lane)) == 1 then
        return
    end
    redis.call('SREM', key('lanes'), lane)
    redis.call('HDEL', key('running'), lane)
    for _, priority in ipairs(PRIORITIES) do
        redis.call('DEL', key('new', priority, lane), key('again', priority, lane), key('left', priority, lane))
    end
    redis.call('DEL', key('refused', lane), key('turns', lane))
end

-- ------------------------------------------------------------------ workers' models

-- Records that a worker serves a model under a configuration, and no longer under any other.
local function serve(worker, config, model)
    local name, own = key('serving', model), worker .. ' ' .. config
    redis.call('ZREMRANGEBYSCORE', name, '-inf', now - SERVING_MS)
    redis.call('ZREMRANGEBYSCORE', name, '(' .. now, '+inf') -- this server's clock has gone back
    if redis.call('ZADD', name, now, own) == 1 then
        for _, member in ipairs(redis.call('ZRANGE', name, 0, -1)) do
            if member ~= own and string.sub(member, 1, #worker + 1) == worker .. ' ' then
                redis.call('ZREM', name, member)
            end
        end
    end
    redis.call('PEXPIRE', name, SERVING_MS)
end

local function model_of(lane)
    return string.match(lane, '^(.*)/') or lane
end

-- Returns the configurations under which a lane's model is served, or was recently.
local function configs_of(lane)
    local found = {}
    for _, member in ipairs(redis.call('ZRANGE', key('serving', model_of(lane)), 0, -1)) do
        found[string.match(member, '(%S+)$')] = true
    end
    return found
end

-- Whether a worker that serves a lane's model has been heard of lately.
local function is_worked(lane)
    return redis.call('ZCOUNT', key('serving', model_of(lane)), now - LOST, '+inf') > 0
end

-- Whether one of these configurations is not among those under which a job was refused.
local function may_be_run(configs, refused)
    for config in pairs(configs) do
        if not string.find(refused, ' ' .. config .. ' ', 1, true) then
            return true
        end
    end
    return false
end

-- ------------------------------------------------------------------ ends

local function count_end(lane)
    local ends = key('ends', lane)
    local bucket = math.floor(now / BUCKET_MS)
    if redis.call('HINCRBY', ends, string.format('%.0f', bucket), 1) == 1 then
        for _, old in ipairs(redis.call('HKEYS', ends)) do
            local at = tonumber(old) * BUCKET_MS
            if at < now - LATELY_MS or at > now then -- later ones: this server's clock has gone back
                redis.call('HDEL', ends, old)
            end
        end
        redis.call('PEXPIRE', ends, LATELY_MS)
    end
end

local OUTCOMES = {job_expired = 'expired', job_poisoned = 'poisoned'} -- failures that are counted separately

local function ended_as(job)
    return job.id .. ' ' .. job.bytes .. ' ' .. job.owner
end

-- Makes a job final. This is the only place where that happens.
local function end_job(job, status, code, message, param)
    leave(job)
    if job.status == 'in_progress' then
        count_end(job.lane)
    end
    set(job, {status = status, ended = now, retry_at = 0, stream = '', entry = ''})
    if code then
        set(job, {error_code = code, error_message = message, error_param = param or ''})
    end
    redis.call('HDEL', key('refused', job.lane), job.id)
    redis.call('HINCRBY', key('totals'), (OUTCOMES[code] or status) .. ' ' .. job.lane, 1)
    local gone_at = now + job.keep
    redis.call('ZREM', key('expiring'), job.id)
    redis.call('ZADD', key('ended'), gone_at, ended_as(job))
    redis.call('PEXPIREAT', key('job', job.id), gone_at)
    redis.call('PEXPIREAT', key('chunks', job.id), gone_at)
    charge(job.owner, -1, 0)
    close_if_empty(job.lane)
    tell(job)
    if job.batch == '' then
        announce(TAG, 'response.' .. status, job.id, job.owner)
    elseif redis.call('HEXISTS', key('lines', job.batch), job.id) == 1 then -- the batch is announced as a whole
        redis.call('RPUSH', key('done', job.batch), job.id)
    end
end

local function expire(job)
    end_job(job, 'failed', 'job_expired', 'The job expired before it had ended.')
end

local function poison(job)
    local last = (job.setback or '') == '' and '' or ' The last: ' .. job.setback
    local message = 'The job was given up: ' .. job.failures .. ' attempts at it failed.' .. last
    end_job(job, 'failed', 'job_poisoned', message)
end

local function forget(id, bytes, owner)
    redis.call('DEL', key('job', id), key('chunks', id))
    redis.call('ZREM', key('jobs'), id)
    redis.call('ZREM', key('jobs', owner), id)
    charge(owner, 0, -bytes)
end

-- Deletes a job and its answer. If it is running, its worker is notified.
local function delete(job)
    if not is_final(job) then
        stop(job)
        end_job(job, 'cancelled')
    end
    redis.call('ZREM', key('ended'), ended_as(job))
    forget(job.id, job.bytes, job.owner)
end

-- ------------------------------------------------------------------ the sweep

local function take_over(stream)
    -- Redis 6.2 returns two elements, later ones three; with JUSTID the second has ids in both.
    local at, found, lost = '0-0', {}, nil
    repeat -- each call looks at ten times as many entries at most, and returns where it has stopped
        lost = redis.call('XAUTOCLAIM', stream, GROUP, BY_SWEEP, LOST, at, 'COUNT', SWEPT_MAX, 'JUSTID')
        at = lost[1]
        for _, entry in ipairs(lost[2]) do
            found[#found + 1] = entry
        end
    until at == '0-0' or #found >= SWEPT_MAX
    for _, entry in ipairs(found) do
        local read = redis.call('XRANGE', stream, entry, entry)
        local job = read[1] and load(read[1][2][2])
        if job and job.status == 'in_progress' and job.stream == stream and job.entry == entry then
            leave(job)
            stop(job)
            set(job, {failures = job.failures + 1, setback = 'Its worker died, or could not reach the store.'})
            queue(job, false, 0)
        else
            drop_entry(stream, entry)
        end
    end
    for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', stream, GROUP)) do
        if consumer[4] == 0 then -- its next claim creates it again
            redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, consumer[2])
        end
    end
end

local function streams_of(lane)
    local found = {}
    for _, priority in ipairs(PRIORITIES) do
        for _, kind in ipairs({'again', 'left', 'new'}) do
            local stream = key(kind, priority, lane)
            if redis.call('EXISTS', stream) == 1 then
                open(stream)
                found[#found + 1] = stream
            end
        end
    end
    return found
end

-- This server's clock has gone back: stored times in the future must not delay anything. Claims count from now on;
-- resting jobs are released.
local function set_back()
    for _, lane in ipairs(redis.call('HKEYS', key('running'))) do
        for _, stream in ipairs(streams_of(lane)) do
            local at = '0-0'
            repeat
                at = redis.call('XAUTOCLAIM', stream, GROUP, BY_SWEEP, 0, at, 'COUNT', SWEPT_MAX, 'JUSTID')[1]
            until at == '0-0'
        end
    end
    for _, lane in ipairs(redis.call('SMEMBERS', key('lanes'))) do
        for _, id in ipairs(redis.call('ZRANGE', key('resting', lane), 0, -1)) do
            redis.call('ZADD', key('resting', lane), now, id)
        end
    end
end

-- Performs everything that is due. Any script may run it, at most once in SWEEP_MS unless something is left over.
local function sweep()
    local clock = redis.call('HMGET', key('clock'), 'heard', 'since', 'swept')
    local heard, since, swept = tonumber(clock[1] or 0), tonumber(clock[2] or 0), tonumber(clock[3] or 0)
    if now - heard > LOST / 2 then
        since = now -- the store or all its clients were away: heartbeats could not arrive
    elseif heard - now > SWEEP_MS then
        since = now
        set_back()
    end
    local is_due = now - swept >= SWEEP_MS or now < swept
    redis.call('HSET', key('clock'), 'heard', now, 'since', since, 'swept', is_due and now or swept)
    if not is_due then
        return
    end
    local due = redis.call('ZRANGEBYSCORE', key('ended'), '-inf', now, 'LIMIT', 0, SWEPT_MAX)
    local late = redis.call('ZRANGEBYSCORE', key('expiring'), '-inf', now, 'LIMIT', 0, SWEPT_MAX)
    if #due == SWEPT_MAX or #late == SWEPT_MAX then
        redis.call('HSET', key('clock'), 'swept', 0) -- the next script goes on
    end
    for _, ended in ipairs(due) do
        forget(string.match(ended, '^(%S+) (%d+) (.*)$'))
        redis.call('ZREM', key('ended'), ended)
    end
    for _, id in ipairs(late) do
        local job = load(id)
        if job then
            stop(job)
            expire(job)
        end
        redis.call('ZREM', key('expiring'), id)
    end
    if now - since >= LOST then
        for _, lane in ipairs(redis.call('HKEYS', key('running'))) do
            for _, stream in ipairs(streams_of(lane)) do
                take_over(stream)
            end
        end
    end
end

-- Returns the id of the job or batch accepted under an idempotency key, if any, and whether the key belongs to a
-- different request.
local function submitted(digest, fingerprint)
    if digest == '' then
        return nil, false
    end
    local seen, id = string.match(redis.call('GET', key('submitted', digest)) or '', '^(%S+) (%S+)$')
    return id, seen ~= nil and seen ~= fingerprint
end

local function remember_submitted(digest, fingerprint, id, keep_ms)
    if digest ~= '' then
        redis.call('SET', key('submitted', digest), fingerprint .. ' ' .. id, 'PX', keep_ms)
    end
end
