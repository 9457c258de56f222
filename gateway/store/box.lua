-- KEYS  1  owner  STRING  owner of the box; expires
--       2  fence  STRING  fencing token of the last change of owner; never decreases
--       3  state  STRING  written by the owner
--       4  notes  HASH    process -> expiry of its note, in ms of this server's clock, and the note
-- ARGV  1  process, 2  ttl in ms; 0 to leave, 3  fence under which it writes, 4  state, 5  note
-- Returns the fence if this process is the owner, else 0; the state; the notes of the others.
-- Redis 6.2 commands only.

local process, ttl = ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local owner = redis.call('GET', KEYS[1])
redis.call('DEL', KEYS[1] .. ':full') -- for a server that is full: see settle.lua

if ttl == 0 then
    if owner == process then
        redis.call('DEL', KEYS[1])
    end
    redis.call('HDEL', KEYS[4], process)
    return {0, '', {}}
end

local fence = tonumber(redis.call('GET', KEYS[2])) or 0
if not owner then
    owner = process
    -- Based on the clock, so that it increases even if the server has lost its data.
    fence = math.max(fence + 1, now)
    redis.call('SET', KEYS[2], string.format('%.0f', fence))
end
if owner == process then
    redis.call('SET', KEYS[1], process, 'PX', ttl)
    if ARGV[4] ~= '' and tonumber(ARGV[3]) == fence then
        redis.call('SET', KEYS[3], ARGV[4], 'PX', 86400000)
    end
else
    fence = 0
end

redis.call('HSET', KEYS[4], process, string.format('%.0f', now + ttl) .. ' ' .. ARGV[5])
redis.call('PEXPIRE', KEYS[4], ttl)
local notes, held = {}, redis.call('HGETALL', KEYS[4])
for i = 1, #held, 2 do
    local until_ms, note = string.match(held[i + 1], '^(%d+) (.*)$')
    until_ms = tonumber(until_ms) or 0 -- 0: not ours
    if until_ms > now + ttl then -- this server's clock has gone back
        redis.call('HSET', KEYS[4], held[i], string.format('%.0f', now + ttl) .. ' ' .. note)
        if held[i] == owner then
            redis.call('PEXPIRE', KEYS[1], ttl)
        end
    end
    if until_ms <= now then
        redis.call('HDEL', KEYS[4], held[i])
    elseif held[i] ~= process then
        notes[#notes + 1] = note
    end
end
return {fence, redis.call('GET', KEYS[3]) or '', notes}
