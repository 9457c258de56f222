-- Settles one process's account with a backend against those of all others. Redis 6.2 commands only.
--
-- KEYS  1  accounts  HASH  owner -> its account; '#' -> version, which increases with every change
-- ARGV  1  channel, 2  backend, 3  owner, 4  ttl in ms, 5  number of counters,
--       6  number of this command: it is ignored if a later one has already been processed,
--       7  1 if requests of the owner wait for capacity there, else 0,
--       8  1 if it may hold surplus, else 0,
--       9  number of other processes that did not return their surplus,
--       then counters: the load of its requests; the grant it wants, used or not; the limit up to which
--       surplus may be granted (-1: none of this counter); then per claim: the claim, the backend's limit.
-- Returns -1 if the command was ignored; else 1 if the owner's account existed, 0 if not; the version; how many
-- others have surplus; 1 if the owner may hold surplus, else 0; the load of all others' requests, and their
-- grants; the owner's grant; and per claim 0 if it was counted, or the number of the counter that is full.
--
-- An account contains, separated by spaces: its expiry, in ms of this server's clock; the number of the command
-- that wrote it; whether its owner waits; whether it may hold surplus; per counter its load, then its
-- grant. Limits apply to the sum of grants. All values are absolute: a lost or repeated command is
-- corrected by the next one. The script does not know what a counter means; that is up to the caller.

local ACCOUNTS = KEYS[1]
local CHANNEL, BACKEND, OWNER, TTL, COUNTERS = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local NUMBER, WAITS, MAY_KEEP, DEAF = tonumber(ARGV[6]), ARGV[7] == '1', ARGV[8] == '1', tonumber(ARGV[9])
local USED, KEPT, CEILING, CLAIMS = 9, 9 + COUNTERS, 9 + 2 * COUNTERS, 9 + 3 * COUNTERS -- offsets in ARGV
local EXPIRES, LAST, WAITED, KEPT_ON, HEAD = 1, 2, 3, 4, 4 -- offsets in an account

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- A server that is full refuses a script's first write, or none. This one needs no room, for there is no such key: jobs
-- that fill a server could not make room if nobody knew how many may run.
redis.call('DEL', ACCOUNTS .. ':full')

local function numbers(text)
    local found = {}
    for word in string.gmatch(text, '%S+') do
        found[#found + 1] = tonumber(word)
    end
    return #found == HEAD + 2 * COUNTERS and found or nil
end

local function text(values)
    return string.format(string.rep('%.0f ', #values - 1) .. '%.0f', unpack(values))
end

local function vector(first)
    local found = {}
    for i = 1, COUNTERS do
        found[i] = tonumber(ARGV[first + i])
    end
    return found
end

-- Read all accounts.
local version, owners, waiting, keeping = 0, 1, 0, 0
local others_used, others_kept, expired, mine = {}, {}, {}, nil
for i = 1, COUNTERS do
    others_used[i], others_kept[i] = 0, 0
end
local all = redis.call('HGETALL', ACCOUNTS)
for at = 1, #all, 2 do
    local owner, account = all[at], numbers(all[at + 1])
    if owner == '#' then
        version = tonumber(all[at + 1]) or 0
    elseif owner == OWNER then
        mine = account
    elseif account and account[EXPIRES] > now then
        if account[EXPIRES] > now + TTL then -- this server's clock has gone back
            account[EXPIRES] = now + TTL
            redis.call('HSET', ACCOUNTS, owner, text(account))
        end
        owners = owners + 1
        waiting, keeping = waiting + account[WAITED], keeping + account[KEPT_ON]
        for i = 1, COUNTERS do
            others_used[i] = others_used[i] + account[HEAD + i]
            others_kept[i] = others_kept[i] + account[HEAD + COUNTERS + i]
        end
    else
        redis.call('HDEL', ACCOUNTS, owner)
        expired[owner] = account
    end
end
if mine and mine[LAST] >= NUMBER then
    return {-1}
end
local before = mine and mine[EXPIRES] > now and mine or nil
version = math.max(version + 1, time[1] * 1000000 + time[2])

-- Claims: each is granted as a whole or not at all, under its own limits.
local used, granted, outcomes, is_refused = vector(USED), {}, {}, false
local took, most = 0, {} -- number of granted claims, and the largest per counter
for i = 1, COUNTERS do
    granted[i], most[i] = 0, 0
end
for at = CLAIMS, #ARGV - 1, 2 * COUNTERS do
    local claim, full = vector(at), 0
    for i = 1, COUNTERS do
        local limit = tonumber(ARGV[at + COUNTERS + i])
        if claim[i] > 0 and others_kept[i] + used[i] + granted[i] + claim[i] > limit then
            full = i
            break
        end
    end
    if full == 0 then
        took = took + 1
        for i = 1, COUNTERS do
            granted[i], most[i] = granted[i] + claim[i], math.max(most[i], claim[i])
        end
    else
        is_refused = true
    end
    outcomes[#outcomes + 1] = full
end

-- Surplus, so that it need not ask for each request: what it had before and, if it has just
-- asked, a quarter of its load and as much as it asked for. Grants with surplus end at three quarters of a limit, and
-- take at most half of its part of what is left below that. None if that is less than it asked for, or if any
-- process waits.
local kept, keeps = {}, MAY_KEEP and not WAITS and waiting == 0 and not is_refused
local room = {}
for i = 1, COUNTERS do
    local least, ceiling = used[i] + granted[i], tonumber(ARGV[CEILING + i])
    local wanted = least
    if before and ceiling >= 0 then
        wanted = math.max(least, math.min(tonumber(ARGV[KEPT + i]), before[HEAD + COUNTERS + i]))
    end
    kept[i] = wanted
    if ceiling >= 0 then
        room[i] = math.floor((0.75 * ceiling - others_kept[i] - wanted) / (2 * owners))
        keeps = keeps and room[i] >= most[i]
    end
end
for i = 1, COUNTERS do
    local least = used[i] + granted[i]
    if not keeps then
        kept[i] = least
    elseif took > 0 and room[i] then
        local wish = least + granted[i] + math.floor(used[i] / 4)
        kept[i] = math.max(kept[i], math.min(wish, kept[i] + room[i]))
    end
end

-- Publish freed capacity and returned surplus if any process waits. If a claim found no room, ask the others
-- to return their surplus.
local function tell(owner, freed)
    redis.call('PUBLISH', CHANNEL, owner .. ' ' .. text({version}) .. ' ' .. text(freed) .. ' ' .. BACKEND)
end

if waiting > 0 then
    for owner, account in pairs(expired) do
        local freed = {}
        for i = 1, COUNTERS do
            freed[i] = account[HEAD + i]
        end
        tell(owner, freed)
    end
    if before then
        local freed, is_less = {}, before[KEPT_ON] == 1 and not keeps
        for i = 1, COUNTERS do
            freed[i] = math.max(0, before[HEAD + i] - used[i] - granted[i])
            is_less = is_less or kept[i] < before[HEAD + COUNTERS + i]
        end
        if is_less then
            tell(OWNER, freed)
        end
    end
end
if keeping > DEAF and (is_refused or (WAITS and not (before and before[WAITED] == 1))) then
    redis.call('PUBLISH', CHANNEL, OWNER .. ' ' .. BACKEND)
end

-- An empty account remains until it expires, so that a late command from a stalled connection is recognized.
local account = {now + TTL, NUMBER, (WAITS or is_refused) and 1 or 0, keeps and 1 or 0}
local answer = {before and 1 or 0, version, keeping, keeps and 1 or 0}
for i = 1, COUNTERS do
    account[HEAD + i], account[HEAD + COUNTERS + i] = used[i] + granted[i], kept[i]
    answer[4 + i], answer[4 + COUNTERS + i], answer[4 + 2 * COUNTERS + i] = others_used[i], others_kept[i], kept[i]
end
redis.call('HSET', ACCOUNTS, OWNER, text(account), '#', text({version}))
redis.call('PEXPIREAT', ACCOUNTS, now + 2 * TTL)
for i, outcome in ipairs(outcomes) do
    answer[4 + 3 * COUNTERS + i] = outcome
end
return answer
