-- Shared code of the batch scripts; prepended to each of them, after webhooks.lua, jobs.lua and files.lua.
-- Redis 6.2 commands only.
--
-- batch:<id>        HASH    a batch, its lease (fence, until), and its progress (cursor, offset)
-- lines:<id>        HASH    job id -> "number custom_id" of the lines that are jobs without a written result
-- done:<id>         LIST    those of them whose jobs have ended, in that order
-- batches:<owner>   ZSET    ids in the order of creation
-- batches_open      ZSET    ids of batches that are not final, in the same order
-- batches_counts    HASH    number of these per owner
-- batches_ended     ZSET    ids of final batches, by the time of deletion
--
-- `fence` counts how often a batch was leased. A runner passes its number, and is rejected once another has leased
-- the batch. It also passes the last line by which it advanced the cursor, and is rejected if the store has lost that
-- step: then it must continue from the cursor. Every operation of a runner is one script, which also renews its lease.
-- A line is submitted as a job, or its result written, in the step that advances the cursor; a job's result is
-- written in the step that deletes the job. So the result of every line is written exactly once.

local FINAL = {failed = true, completed = true, expired = true, cancelled = true}
local BATCH_SHOWN = {
    'owner', 'endpoint', 'input', 'created', 'status', 'times', 'total', 'completed', 'failed', 'errors', 'output',
    'error', 'metadata', 'headers', 'output_keep'
}

local function show_batch(id)
    local batch = redis.call('HMGET', key('batch', id), unpack(BATCH_SHOWN))
    return batch[1] and {id, unpack(batch)}
end

-- Sets a batch's status, and the time at which it got into it.
local function move_batch(id, status)
    local name = key('batch', id)
    local times = redis.call('HGET', name, 'times') .. status .. ' ' .. time[1] .. ' '
    redis.call('HSET', name, 'status', status, 'times', times)
end

-- Cancels a batch unless it is over or ending. Returns whether there is such a batch.
local function cancel_batch(id)
    local status = redis.call('HGET', key('batch', id), 'status')
    if status == 'validating' or status == 'in_progress' then
        move_batch(id, 'cancelling')
    end
    return status
end

-- Returns whether a runner holds the batch, and renews its lease if so.
local function holds_batch(id, fence, number, lease)
    local batch = redis.call('HMGET', key('batch', id), 'fence', 'status', 'cursor')
    if batch[1] ~= fence or FINAL[batch[2]] or tonumber(batch[3]) < tonumber(number) then
        return false
    end
    redis.call('HSET', key('batch', id), 'until', now + lease)
    return true
end

-- Appends lines to a batch's output or error file, which is created with the first.
local function write_lines(id, kind, file, lines)
    local name = key('batch', id)
    local owner = redis.call('HGET', name, 'owner')
    if redis.call('HGET', name, kind) == '' then
        begin_file(file, owner, id .. '_' .. kind .. '.jsonl', 'batch_output')
        redis.call('HSET', name, kind, file)
    end
    append_to_file(file, owner, lines)
end

-- Makes a batch final. This is the only place where that happens.
local function end_batch(id, status, keep)
    local name = key('batch', id)
    local batch = redis.call('HMGET', name, 'owner', 'input', 'output', 'error', 'output_keep')
    for i = 3, 4 do
        if batch[i] ~= '' then
            close_file(batch[i], batch[1], batch[5])
        end
    end
    move_batch(id, status)
    if redis.call('EXISTS', key('file', batch[2])) == 1 then
        redis.call('HINCRBY', key('file', batch[2]), 'uses', -1)
    end
    redis.call('DEL', key('done', id))
    redis.call('ZREM', key('batches_open'), id)
    redis.call('ZADD', key('batches_ended'), now + keep, id)
    if redis.call('HINCRBY', key('batches_counts'), batch[1], -1) <= 0 then
        redis.call('HDEL', key('batches_counts'), batch[1])
    end
    announce(TAG, 'batch.' .. status, id, batch[1])
end

local function forget_batch(id)
    redis.call('ZREM', key('batches_ended'), id)
    redis.call('ZREM', key('batches', redis.call('HGET', key('batch', id), 'owner') or ''), id)
    redis.call('DEL', key('batch', id))
end
