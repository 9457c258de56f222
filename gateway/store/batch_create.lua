-- ARGV  id, owner, endpoint, input file, metadata, headers, how long the files it leaves are kept in ms, ms until it
--       expires, how many of the owner may be open, how many there may be, then digest of the idempotency key or '',
--       fingerprint, how long it is kept in ms.
-- Returns the batch, this one or the one made before it; or why it is refused.

local id, owner, endpoint, input, metadata, headers, keep, expires, open_max, most = unpack(ARGV, OWN_ARGUMENTS)
local digest, fingerprint, promise_ms = unpack(ARGV, OWN_ARGUMENTS + 10)

-- Returns the oldest batch of an owner that has ended: others may be open for a day, while thousands come and go.
local function first_ended(owner, open_max)
    for _, id in ipairs(redis.call('ZRANGE', key('batches', owner), 0, open_max)) do
        if FINAL[redis.call('HGET', key('batch', id), 'status') or 'failed'] then
            return id
        end
    end
end

local before = show_batch(id)
if before then
    return before
end
if redis.call('EXISTS', key('revoked', id)) == 1 then
    return 'revoked'
end
local made, is_reused = submitted(digest, fingerprint)
if is_reused then
    return 'idempotency_key_reused'
end
before = made and show_batch(made)
if before then
    return before
end
local file = show_file(input)
if not file or file[2] ~= owner then
    return 'file_not_found'
end
if file[4] ~= 'batch' then
    return 'invalid_purpose'
end
if tonumber(redis.call('HGET', key('batches_counts'), owner) or 0) >= tonumber(open_max) then
    return 'too_many_batches'
end
if redis.call('ZCARD', key('batches', owner)) >= tonumber(most) then
    local first = first_ended(owner, open_max)
    if not first then
        return 'too_many_batches'
    end
    forget_batch(first)
end
redis.call(
    'HSET', key('batch', id), 'owner', owner, 'endpoint', endpoint, 'input', input, 'metadata', metadata,
    'headers', headers, 'output_keep', keep, 'created', now, 'expires', now + expires, 'status', 'validating',
    'times', '', 'total', 0, 'completed', 0, 'failed', 0, 'errors', '', 'output', '', 'error', '',
    'until', 0, 'fence', 0, 'cursor', 0, 'offset', 0
)
remember_submitted(digest, fingerprint, id, promise_ms)
redis.call('HINCRBY', key('file', input), 'uses', 1)
redis.call('HINCRBY', key('batches_counts'), owner, 1)
local arrival = redis.call('INCR', key('arrivals'))
redis.call('ZADD', key('batches', owner), arrival, id)
redis.call('ZADD', key('batches_open'), arrival, id)
return show_batch(id)
