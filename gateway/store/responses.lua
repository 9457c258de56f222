-- What is kept for one owner: KEYS are its records by id (hash), when each expires (sorted set, ms), and
-- their bytes together (string). ARGV: what to do, the id, and for put the record, its life in ms, and the
-- most bytes. Everything is forgotten once the last record has expired.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local bytes = tonumber(redis.call('GET', KEYS[3]) or '0')

local function drop(id)
    bytes = bytes - redis.call('HSTRLEN', KEYS[1], id)
    redis.call('ZREM', KEYS[2], id)
    return redis.call('HDEL', KEYS[1], id)
end

local function settle()
    local last = redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2]
    if not last then
        redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
        return
    end
    redis.call('SET', KEYS[3], bytes)
    for _, key in ipairs(KEYS) do
        redis.call('PEXPIREAT', key, last)
    end
end

local expired = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)
for _, id in ipairs(expired) do
    drop(id)
end

if ARGV[1] == 'get' then
    if #expired > 0 then
        settle()
    end
    return redis.call('HGET', KEYS[1], ARGV[2])
end

local had = drop(ARGV[2])
if ARGV[1] == 'put' then
    bytes = bytes + #ARGV[3]
    while bytes > tonumber(ARGV[5]) do
        local first = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
        if not first then
            bytes = #ARGV[3]  -- the sum was wrong: a server under pressure may drop single keys
            break
        end
        drop(first)
    end
    redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
    redis.call('ZADD', KEYS[2], now + tonumber(ARGV[4]), ARGV[2])
end
settle()
return had
