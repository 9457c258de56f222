-- KEYS  1  tag
-- ARGV  endpoint, id, claim, then failures so far and ms until the next attempt, or nothing: it is over.
-- Of a claim that somebody else has by now, only an end counts.

local tag, endpoint, id, claim, failures, wait_ms = KEYS[1], unpack(ARGV)
local due = tag .. ':webhooks:due:' .. endpoint
local delivery = tag .. ':webhooks:delivery:' .. endpoint .. ':' .. id

insist(tag)
if not wait_ms then
    redis.call('ZREM', due, id)
    redis.call('DEL', delivery)
    if redis.call('EXISTS', due) == 0 then
        redis.call('DEL', tag .. ':webhooks:last:' .. endpoint)
    end
elseif redis.call('HGET', delivery, 'claim') == claim then
    redis.call('HSET', delivery, 'failures', failures)
    redis.call('PEXPIRE', delivery, WEBHOOKS_KEEP_MS)
    redis.call('ZADD', due, now + wait_ms, id)
    redis.call('PEXPIRE', due, WEBHOOKS_KEEP_MS)
end
