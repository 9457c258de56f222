-- ARGV  worker, token, failures after which a job is given up, the worker's configuration, then lanes.
-- Returns the job that was claimed, or nothing, as while jobs are drained. With the token of its last claim: the same job again.

local PAGE, LOOKED_MAX = 100, 10000
local CLAIMED_MS = 3600000 -- how long a worker may be unable to ask what became of its last claim
local worker, token, attempts_max, config = unpack(ARGV, OWN_ARGUMENTS, OWN_ARGUMENTS + 3)
local lanes = {unpack(ARGV, OWN_ARGUMENTS + 4)}

-- What has rested goes again.
local function wake(lane)
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('resting', lane), '-inf', now, 'LIMIT', 0, SWEPT_MAX)) do
        redis.call('ZREM', key('resting', lane), id)
        local job = load(id)
        if job then
            set(job, {retry_at = 0})
            enqueue(job, false)
        else -- deleted by hand
            redis.call('ZREM', key('ages', lane), id)
        end
    end
end

-- Returns the id and the order of a lane's next job. One that was refused under this worker's configuration is left to
-- others as long as there are any who have not refused it.
local function head_of(lane)
    if redis.call('EXISTS', key('refused', lane)) == 0 then
        return unpack(redis.call('ZRANGE', key('waiting', lane), 0, 0, 'WITHSCORES'))
    end
    local configs = configs_of(lane)
    for at = 0, LOOKED_MAX - 1, PAGE do
        local page = redis.call('ZRANGE', key('waiting', lane), at, at + PAGE - 1, 'WITHSCORES')
        for i = 1, #page, 2 do
            local refused = redis.call('HGET', key('refused', lane), page[i]) or ''
            if not string.find(refused, ' ' .. config .. ' ', 1, true) or not may_be_run(configs, refused) then
                return page[i], page[i + 1]
            end
        end
        if #page < 2 * PAGE then
            break
        end
    end
end

local function is_less(these, those)
    for i, value in ipairs(these) do
        if value ~= those[i] then
            return value < those[i]
        end
    end
    return false
end

-- Returns the id and the lane of the job that is next: by priority, then the head of the lane with the fewest
-- claimed jobs, so that a lane's backlog does not take a worker from the others; then the one accepted first.
local function next_id()
    local first, least, its_lane
    for _, lane in ipairs(lanes) do
        local id, order = head_of(lane)
        if id then
            local running = tonumber(redis.call('HGET', key('running'), lane) or 0)
            local arrival = tonumber(redis.call('ZSCORE', key('jobs'), id) or 0)
            local rank = {math.floor(order / SPAN), running, arrival}
            if not first or is_less(rank, least) then
                first, least, its_lane = id, rank, lane
            end
        end
    end
    return first, its_lane
end

insist(TAG)
sweep()
local last_token, last_id = string.match(redis.call('GET', key('claimed', worker)) or '', '^(%S+) (%S+)$')
if last_token == token and holds(load(last_id), token) then
    return show(last_id)
end
if redis.call('EXISTS', key('drained')) == 1 then
    return false
end
for _, lane in ipairs(lanes) do
    wake(lane)
end
for _ = 1, SWEPT_MAX do
    local id, lane = next_id()
    if not id then
        return false
    end
    local job = load(id)
    local expires_at = redis.call('ZSCORE', key('expiring'), id)
    if not job then -- deleted by hand
        redis.call('ZREM', key('waiting', lane), id)
        redis.call('ZREM', key('ages', lane), id)
    elseif expires_at and tonumber(expires_at) <= now then
        expire(job)
    elseif tonumber(job.failures) >= tonumber(attempts_max) then
        poison(job)
    elseif take(job, worker) then
        note_turn(job)
        unqueue(job)
        redis.call('HINCRBY', key('running'), job.lane, 1)
        set(job, {status = 'in_progress', attempt = job.attempt + 1, started = now, worker = worker, token = token})
        redis.call('SET', key('claimed', worker), token .. ' ' .. id, 'PX', CLAIMED_MS)
        tell(job)
        return show(id)
    end
end
return false
