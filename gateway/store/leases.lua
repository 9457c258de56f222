-- What the lease scripts share; it is put before each of them. Redis 6.2 commands only.
--
-- KEYS  1  leases   ZSET  lease -> when it expires, in ms of this server's clock
--       2  claims   HASH  lease -> what it takes: its counters in order, separated by spaces
--       3  sums     HASH  owner -> how many leases it holds, then the sums of their counters;
--                         '*' -> the same of all owners; '#' -> version, which grows with every change
--       4  gone     ZSET  lease given back -> until when a command that comes late must not revive it
-- ARGV  1  channel, 2  backend, 3  owner, 4  ttl in ms, 5  number of counters; then the script's own.
--
-- A lease is named owner:number. The sums are kept as leases come and go, so that no script has to add
-- up what is held. What is counted, and what a limit means, is the caller's business: here are numbers.

local LEASES, CLAIMS, SUMS, GONE = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local CHANNEL, BACKEND, OWNER = ARGV[1], ARGV[2], ARGV[3]
local TTL, COUNTERS, OWN_ARGUMENTS = tonumber(ARGV[4]), tonumber(ARGV[5]), 6

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local read = redis.call('HMGET', SUMS, '#', '*', OWNER)
local version = tonumber(read[1]) or 0
local next_version = math.max(version + 1, time[1] * 1000000 + time[2])
local touched = false

local function numbers(text)
    local vector = {}
    for word in string.gmatch(text, '%S+') do
        vector[#vector + 1] = tonumber(word)
    end
    return vector
end

local function text(vector)
    local words = {}
    for i, number in ipairs(vector) do
        words[i] = string.format('%.0f', number)
    end
    return table.concat(words, ' ')
end

local function arguments(first)
    return table.concat(ARGV, ' ', first, first + COUNTERS - 1)
end

local function sum_from(text)
    local sum = numbers(text or '')
    for i = #sum + 1, COUNTERS + 1 do
        sum[i] = 0
    end
    return sum
end

local sums = {['*'] = sum_from(read[2]), [OWNER] = sum_from(read[3])} -- those this run knows

local function sum_of(owner)
    sums[owner] = sums[owner] or sum_from(redis.call('HGET', SUMS, owner))
    return sums[owner]
end

-- Adds `sign` times a claim, and `leases` leases, to the sums that a lease is part of.
local function count(lease, claim, sign, leases)
    for _, owner in ipairs({'*', string.match(lease, '^[^:]*')}) do
        local sum = sum_of(owner)
        sum[1] = sum[1] + leases
        for i = 1, COUNTERS do
            sum[i + 1] = sum[i + 1] + sign * (claim[i] or 0)
        end
    end
    touched = true
end

-- Tells every replica what became free, and of whose.
local function tell(lease, claim)
    local owner = string.match(lease, '^[^:]*')
    redis.call('PUBLISH', CHANNEL, owner .. ' ' .. text({next_version}) .. ' ' .. text(claim) .. ' ' .. BACKEND)
end

local function add(lease, claim)
    redis.call('ZADD', LEASES, now + TTL, lease)
    redis.call('HSET', CLAIMS, lease, claim)
    count(lease, numbers(claim), 1, 1)
end

local function remove(lease)
    local claim = redis.call('HGET', CLAIMS, lease)
    if redis.call('ZREM', LEASES, lease) == 1 and claim then
        redis.call('HDEL', CLAIMS, lease)
        claim = numbers(claim)
        count(lease, claim, -1, -1)
        tell(lease, claim)
    end
end

-- A claim only ever shrinks, so that commands that overtake each other end in the same claim.
local function shrink(lease, claim)
    local old, wanted = numbers(redis.call('HGET', CLAIMS, lease) or ''), numbers(claim)
    local new, freed, any = {}, {}, false
    for i = 1, COUNTERS do
        new[i] = math.min(old[i] or 0, wanted[i])
        freed[i] = (old[i] or 0) - new[i]
        any = any or freed[i] > 0
    end
    if any then
        redis.call('HSET', CLAIMS, lease, text(new))
        count(lease, freed, -1, 0)
        tell(lease, freed)
    end
end

local function is_held(lease)
    return redis.call('ZSCORE', LEASES, lease)
end

local function is_gone(lease)
    return redis.call('ZSCORE', GONE, lease)
end

local function extend(lease)
    redis.call('ZADD', LEASES, now + TTL, lease)
    touched = true
end

local function reclaim()
    for _, lease in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now)) do
        remove(lease)
    end
end

-- Sums that do not belong to the leases, because a key was deleted or evicted, are added up anew.
local function check()
    local held = redis.call('ZCARD', LEASES)
    if sum_of('*')[1] == held and redis.call('HLEN', CLAIMS) == held then
        return
    end
    redis.call('DEL', SUMS)
    sums, touched = {}, true
    for _, lease in ipairs(redis.call('HKEYS', CLAIMS)) do
        if is_held(lease) then
            count(lease, numbers(redis.call('HGET', CLAIMS, lease)), 1, 1)
        else
            redis.call('HDEL', CLAIMS, lease)
        end
    end
    for _, lease in ipairs(redis.call('ZRANGE', LEASES, 0, -1)) do
        if redis.call('HEXISTS', CLAIMS, lease) == 0 then
            redis.call('ZREM', LEASES, lease)
        end
    end
end

-- Writes the sums back. Returns the outcome, the version, the owner's leases, and the others' sums.
local function finish(outcome)
    local all, own = sum_of('*'), sum_of(OWNER)
    if touched then
        version = next_version
        local fields = {'#', text({version})}
        for owner, sum in pairs(sums) do
            if sum[1] > 0 or owner == '*' then
                fields[#fields + 1] = owner
                fields[#fields + 1] = text(sum)
            else
                redis.call('HDEL', SUMS, owner)
            end
        end
        redis.call('HSET', SUMS, unpack(fields))
        -- A backend that nobody uses any more leaves nothing behind.
        for _, key in ipairs({LEASES, CLAIMS, SUMS}) do
            redis.call('PEXPIREAT', key, now + 2 * TTL)
        end
    end
    local answer = {outcome, version, own[1]}
    for i = 2, COUNTERS + 1 do
        answer[i + 2] = all[i] - own[i]
    end
    return answer
end
