-- KEYS  1  replicas  ZSET  owner -> its expiry, in ms of this server's clock
--       2  facts     HASH  owner -> its facts, opaque to scripts
-- ARGV  1  owner, 2  ttl in ms; 0 to leave, 3  its facts; '' for none, 4  maximum bytes of facts to pass on,
--       5  channel on which to make the others read at once; '' if not urgent
-- Returns the number of gateway processes; then, for each other one with facts: its name, ms until its expiry,
-- its facts.

local REPLICAS, FACTS = KEYS[1], KEYS[2]
local OWNER, TTL, OWN_FACTS, LONGEST, CHANNEL = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), ARGV[5]

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('DEL', REPLICAS .. ':full') -- for a server that is full: see settle.lua
redis.call('ZADD', REPLICAS, now + TTL, OWNER)
if type(redis.pcall('HLEN', FACTS)) ~= 'number' then
    redis.call('DEL', FACTS) -- of another type: not ours
end
for _, owner in ipairs(redis.call('ZRANGEBYSCORE', REPLICAS, '-inf', now)) do
    redis.call('ZREM', REPLICAS, owner)
    redis.call('HDEL', FACTS, owner)
end
local count = redis.call('ZCARD', REPLICAS)
if redis.call('HLEN', FACTS) > count then
    redis.call('DEL', FACTS) -- there are orphaned ones; live processes write theirs again within a second
end
if OWN_FACTS ~= '' then
    redis.call('HSET', FACTS, OWNER, OWN_FACTS)
else
    redis.call('HDEL', FACTS, OWNER) -- what it said before is no longer so
end
if TTL > 0 then -- a leaving process must not expire the others' data
    for _, owner in ipairs(redis.call('ZRANGEBYSCORE', REPLICAS, string.format('(%.0f', now + TTL), '+inf')) do
        redis.call('ZADD', REPLICAS, now + TTL, owner) -- this server's clock has gone back
    end
    for _, key in ipairs(KEYS) do
        redis.call('PEXPIREAT', key, now + 2 * TTL)
    end
end
if CHANNEL ~= '' then
    redis.call('PUBLISH', CHANNEL, OWNER)
end

local answer = {count}
local replicas = redis.call('ZRANGE', REPLICAS, 0, -1, 'WITHSCORES')
for i = 1, #replicas, 2 do
    local facts = replicas[i] ~= OWNER and redis.call('HGET', FACTS, replicas[i])
    if facts and #facts <= LONGEST then
        answer[#answer + 1] = replicas[i]
        answer[#answer + 1] = tonumber(replicas[i + 1]) - now
        answer[#answer + 1] = facts
    end
end
return answer
