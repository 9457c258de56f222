-- What the batch scripts share; it is put before each of them, behind webhooks.lua, jobs.lua and files.lua.
-- Redis 6.2 commands only.
--
-- batch:<id>        HASH    a batch, who works at it (runner, until), and how far it has got (cursor, offset)
-- lines:<id>        HASH    job id -> "number custom_id" of the lines that are jobs and are not written down
-- done:<id>         LIST    those of these whose jobs have ended, in this order
-- batches:<owner>   ZSET    ids in the order in which they were made
-- batches_open      ZSET    ids of those that are not final, in the same order
-- batches_counts    HASH    how many of these each owner has
-- batches_ended     ZSET    ids of those that are, by the time at which they are forgotten
--
-- `fence` counts how often a batch was taken. Whoever works at it names the number, and is refused once another
-- has taken it. It also names the last line behind which it has moved the cursor, and is refused where the store has
-- lost that step: it has to go on from where the cursor is. Everything such a runner does is one script, that also
-- renews its lease. A line is handed over as a job, or written down, in the step that moves the cursor behind it; a
-- job's result is written down in the step that forgets the job. So every line is written down once.

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

-- Returns whether a runner has the batch, and renews its lease if so.
local function holds_batch(id, fence, number, lease)
    local batch = redis.call('HMGET', key('batch', id), 'fence', 'status', 'cursor')
    if batch[1] ~= fence or FINAL[batch[2]] or tonumber(batch[3]) < tonumber(number) then
        return false
    end
    redis.call('HSET', key('batch', id), 'until', now + lease)
    return true
end

-- Puts lines behind a batch's file of a kind, output or error, which is made with the first.
local function write_lines(id, kind, file, lines)
    local name = key('batch', id)
    local owner = redis.call('HGET', name, 'owner')
    if redis.call('HGET', name, kind) == '' then
        begin_file(file, owner, id .. '_' .. kind .. '.jsonl', 'batch_output')
        redis.call('HSET', name, kind, file)
    end
    append_to_file(file, owner, lines)
end

-- Makes a batch final. The one place where this happens.
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
    redis.call('DEL', key('lines', id), key('done', id))
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
