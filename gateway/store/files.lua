-- Shared code of the scripts of files and batches; prepended to each of them, after webhooks.lua and jobs.lua.
-- Redis 6.2 commands only.
--
-- file:<id>        HASH    a file: owner, filename, purpose, bytes, created, expires, order, state, uses
-- piece:<id>:<n>   STRING  its bytes from n * PIECE on; all but the last have PIECE
-- files:<owner>    ZSET    ids of complete files in the order of creation
-- filed:<owner>    STRING  bytes of all files of an owner, including FILE_COSTS for each
-- files_expiring   ZSET    ids by the time of deletion
-- listed:files:<owner>:<id>
--                  STRING  the order of a deleted file: who deletes what a list shows goes on behind one of those
--
-- A file is `open`, and invisible, while it is written; one that is left open is deleted after OPEN_MS. `uses` is
-- the number of batches that read it: while it is not 0, the file neither expires nor can be deleted.

local PIECE = 1048576
local FILE_COSTS = 1024
local OPEN_MS = 600000
local LISTED_MS = 600000
local FORGOTTEN_MAX, UNLINKED_MAX = 100, 800 -- files and pieces per script; a file may have hundreds
local FILE_SHOWN = {'owner', 'filename', 'purpose', 'bytes', 'created', 'expires'}

local function spend(owner, bytes)
    if redis.call('INCRBY', key('filed', owner), string.format('%.0f', bytes)) <= 0 then
        redis.call('DEL', key('filed', owner))
    end
end

local function begin_file(id, owner, filename, purpose)
    redis.call(
        'HSET', key('file', id), 'owner', owner, 'filename', filename, 'purpose', purpose, 'bytes', 0,
        'created', now, 'order', redis.call('INCR', key('arrivals')), 'state', 'open', 'uses', 0
    )
    spend(owner, FILE_COSTS)
end

-- Appends data to a file.
local function append_to_file(id, owner, data)
    local bytes = tonumber(redis.call('HGET', key('file', id), 'bytes'))
    local at = 1
    while at <= #data do
        local room = PIECE - bytes % PIECE
        local part = string.sub(data, at, at + room - 1)
        redis.call('APPEND', key('piece', id, string.format('%.0f', math.floor(bytes / PIECE))), part)
        at, bytes = at + #part, bytes + #part
    end
    redis.call('HSET', key('file', id), 'bytes', string.format('%.0f', bytes))
    spend(owner, #data)
end

-- Completes a file, which makes it visible until it expires.
local function close_file(id, owner, keep)
    redis.call('HSET', key('file', id), 'state', 'whole', 'created', now, 'expires', now + keep)
    redis.call('ZADD', key('files', owner), redis.call('HGET', key('file', id), 'order'), id)
    redis.call('ZADD', key('files_expiring'), now + keep, id)
end

local function show_file(id)
    local file = redis.call('HMGET', key('file', id), 'state', unpack(FILE_SHOWN))
    if file[1] ~= 'whole' or tonumber(file[7]) <= now then
        return false
    end
    return {id, unpack(file, 2)}
end

-- Deletes a file. Returns how many pieces it had.
local function forget_file(id)
    local file = redis.call('HMGET', key('file', id), 'owner', 'bytes', 'order', 'state')
    local last = math.floor((file[2] or 0) / PIECE)
    redis.call('ZREM', key('files_expiring'), id)
    if file[1] then
        for n = 0, last do
            redis.call('UNLINK', key('piece', id, n))
        end
        redis.call('ZREM', key('files', file[1]), id)
        redis.call('DEL', key('file', id))
        if file[4] == 'whole' then
            redis.call('SET', key('listed', 'files', file[1], id), file[3], 'PX', LISTED_MS)
        end
        spend(file[1], -file[2] - FILE_COSTS)
    end
    return last + 1
end

-- Deletes expired files that are not being read.
local function sweep_files()
    local due = redis.call('ZRANGEBYSCORE', key('files_expiring'), '-inf', now, 'LIMIT', 0, FORGOTTEN_MAX)
    local unlinked = 0
    for _, id in ipairs(due) do
        if unlinked >= UNLINKED_MAX then
            break
        elseif tonumber(redis.call('HGET', key('file', id), 'uses') or 0) > 0 then
            redis.call('ZADD', key('files_expiring'), now + OPEN_MS, id)
        else
            unlinked = unlinked + forget_file(id)
        end
    end
end
