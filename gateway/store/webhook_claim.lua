-- KEYS  1  tag
-- ARGV  ms after which a claim is over, then any number of: endpoint, how many at most.
-- Returns what is due and nobody's, as endpoint, id, claim, failures, body. It is the caller's until its claim
-- is over.

local tag, found = KEYS[1], {}

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

for i = 2, #ARGV, 2 do
    local due = tag .. ':webhooks:due:' .. ARGV[i]
    redis.call('ZREMRANGEBYSCORE', due, '-inf', now - WEBHOOKS_KEEP_MS) -- what they say of has expired
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, ARGV[i + 1])) do
        local delivery = tag .. ':webhooks:delivery:' .. ARGV[i] .. ':' .. id
        local values = redis.call('HMGET', delivery, 'failures', 'body')
        if values[2] then
            redis.call('ZADD', due, now + ARGV[1], id)
            local claim = redis.call('HINCRBY', delivery, 'claim', 1)
            found[#found + 1] = {ARGV[i], id, claim, tonumber(values[1]), values[2]}
        else
            redis.call('ZREM', due, id)
        end
    end
end
return found
