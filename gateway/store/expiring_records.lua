-- The records of one owner, bounded in bytes; prepended to the scripts that use it. Redis 6.2 commands only.
-- KEYS  1  records   HASH    id -> record
--       2  expiries  ZSET    id -> its expiry, in ms of this server's clock
--       3  bytes     STRING  total size of all records
-- All keys expire with the last record. Each script deletes some of the expired records; the others are ignored by
-- `kept` until a later script deletes them.

local SWEPT_MAX = 200 -- per script: a day's records may expire at once, and no script may block the server for long
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local bytes = tonumber(redis.call('GET', KEYS[3]) or '0')

local function drop(id)
    bytes = bytes - redis.call('HSTRLEN', KEYS[1], id)
    redis.call('ZREM', KEYS[2], id)
    return redis.call('HDEL', KEYS[1], id)
end

-- Updates size and expiry; call it after each change.
local function settle()
    local last = redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2]
    if not last or tonumber(last) <= now then
        redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
        bytes = 0
        return
    end
    redis.call('SET', KEYS[3], bytes)
    for i = 1, 3 do
        redis.call('PEXPIREAT', KEYS[i], last)
    end
end

-- Stores a record of at most `bytes_max`; evicts first what expires first.
local function put(id, record, life_ms, bytes_max)
    redis.call('SET', KEYS[3], bytes) -- a server that is full refuses a script's first write, or none: it must need room
    drop(id)
    bytes = bytes + #record
    while bytes > tonumber(bytes_max) do
        local first = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
        if not first then
            bytes = #record  -- the sum was wrong: a server under memory pressure may evict single keys
            break
        end
        drop(first)
    end
    redis.call('HSET', KEYS[1], id, record)
    redis.call('ZADD', KEYS[2], now + tonumber(life_ms), id)
end

-- Returns a record unless it has expired.
local function kept(id)
    local expires = redis.call('ZSCORE', KEYS[2], id)
    return expires and tonumber(expires) > now and redis.call('HGET', KEYS[1], id)
end

local expired = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, SWEPT_MAX)
if #expired > 0 then
    for _, id in ipairs(expired) do
        drop(id)
    end
    settle()
end
