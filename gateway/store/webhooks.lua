-- What the webhook scripts share, the time, and what a script that ends something says to be heard of; it is put
-- before each of them. Redis 6.2 commands only.
--
-- <tag>:webhooks:wanted                    STRING  is there while some gateway has endpoints
-- <tag>:webhooks:events                    STREAM  what has ended and is not handed on yet
-- <tag>:webhooks:due:<endpoint>            ZSET    deliveries by the time of their next attempt, in ms
-- <tag>:webhooks:delivery:<endpoint>:<id>  HASH    body, claim, failures
-- <tag>:webhooks:last:<endpoint>           STRING  when somebody last asked what is due, in ms
-- <tag>:webhooks:endpoints                 HASH    endpoint -> when a process last said that it has it, in ms, and what
--                                                  it hears of
--
-- All of them expire after WEBHOOKS_KEEP_MS without use, the last one after an hour.

local WEBHOOKS_KEEP_MS = 7 * 86400000 -- twice what the longest row of attempts takes
local WEBHOOK_EVENTS_MAX = 100000

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- Has a server that is full carry out the rest of a script: what was accepted must be able to end, and only what is
-- new is refused. A script's first write is refused, or none; and this one needs no room, for there is no such key.
local function insist(tag)
    redis.call('DEL', tag .. ':full')
end

-- Notes that something has ended, for the endpoints; costs one EXISTS where nobody has any.
-- tag: what every key starts with; kind: type of the event; subject: id of what has ended; owner: '=' and the
-- name of the API key it belongs to, or '-'.
local function announce(tag, kind, subject, owner)
    if redis.call('EXISTS', tag .. ':webhooks:wanted') == 0 then
        return
    end
    local events = tag .. ':webhooks:events'
    redis.call(
        'XADD', events, 'MAXLEN', '~', WEBHOOK_EVENTS_MAX, '*', 'type', kind, 'subject', subject, 'owner', owner
    )
    redis.call('PEXPIRE', events, WEBHOOKS_KEEP_MS)
end
