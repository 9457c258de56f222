-- KEYS  1  tag
-- ARGV  ms after which a claim is over, then any number of: endpoint, how many at most.
-- Returns what is due and nobody's, as endpoint, id, claim, failures, body. It is the caller's until its claim
-- is over.

local SET_BACK_MS = 1000 -- less is nothing to speak of
local tag, found = KEYS[1], {}

-- This server's clock may have gone back: what is due, or claimed, until a time before that is not to wait longer by as
-- much.
local function follow_clock(endpoint, due)
    local last = tag .. ':webhooks:last:' .. endpoint
    if redis.call('EXISTS', due) == 0 then
        redis.call('DEL', last)
        return
    end
    local heard = tonumber(redis.call('GET', last) or 0)
    if heard - now > SET_BACK_MS then
        local waiting = redis.call('ZRANGE', due, 0, -1, 'WITHSCORES')
        for i = 1, #waiting, 2 do
            redis.call('ZADD', due, waiting[i + 1] + now - heard, waiting[i])
        end
    end
    redis.call('SET', last, now, 'PX', WEBHOOKS_KEEP_MS)
end

insist(tag)
for i = 2, #ARGV, 2 do
    local due = tag .. ':webhooks:due:' .. ARGV[i]
    follow_clock(ARGV[i], due)
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
