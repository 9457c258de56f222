-- KEYS  1  tag
-- ARGV  entry of the event, its id, its body, the most that may wait for an endpoint, then endpoints.
-- Returns the endpoints for which too much waits. An event that was handed on before changes nothing.

local tag, entry, id, body, most = KEYS[1], unpack(ARGV, 1, 4)
local dropped = {}

if redis.call('XDEL', tag .. ':webhooks:events', entry) == 0 then
    return dropped
end
for i = 5, #ARGV do
    local due = tag .. ':webhooks:due:' .. ARGV[i]
    redis.call('ZREMRANGEBYSCORE', due, '-inf', now - WEBHOOKS_KEEP_MS) -- what they say of has expired
    if redis.call('ZCARD', due) >= tonumber(most) then
        dropped[#dropped + 1] = ARGV[i]
    else
        local delivery = tag .. ':webhooks:delivery:' .. ARGV[i] .. ':' .. id
        redis.call('HSET', delivery, 'body', body, 'claim', 0, 'failures', 0)
        redis.call('PEXPIRE', delivery, WEBHOOKS_KEEP_MS)
        redis.call('ZADD', due, now, id)
        redis.call('PEXPIRE', due, WEBHOOKS_KEEP_MS)
    end
end
return dropped
