-- ARGV  id, fence, last line, lease in ms, number of the last of these lines, where the next begins, id of the error
--       file, how many lines, the lines: those up to that number never become jobs.
-- Returns 1, also if they were written before; nothing if another has the batch.

local id, fence, last, lease, number, offset, file, count, lines = unpack(ARGV, OWN_ARGUMENTS)

insist(TAG)
if not holds_batch(id, fence, last, lease) then
    return false
end
if tonumber(redis.call('HGET', key('batch', id), 'cursor')) < tonumber(number) then
    write_lines(id, 'error', file, lines)
    redis.call('HSET', key('batch', id), 'cursor', number, 'offset', offset)
    redis.call('HINCRBY', key('batch', id), 'failed', count)
end
return 1
