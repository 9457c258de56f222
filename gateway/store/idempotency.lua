-- Operations on an idempotency key. Prepend expiring_records.lua, which stores the answers: each is a fingerprint and a record.
-- KEYS  4  running  STRING  the running request: fingerprint, space, runner. Expires with the runner's lease.
-- ARGV  what to do, id, fingerprint, runner; begin, renew: the lease in ms; keep: the answer's life in ms, the
--       most bytes, the record.

local what, id, fingerprint, runner = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local RUNNING, own = KEYS[4], fingerprint .. ' ' .. runner
local mark = redis.call('GET', RUNNING)

local function is_of(text)
    return string.sub(text, 1, #fingerprint) == fingerprint
end

if what == 'begin' then
    local record = kept(id)
    if record then
        return is_of(record) and {record} or 'reused'
    end
    if mark and mark ~= own then
        local left = redis.pcall('PTTL', RUNNING) -- an error if the user lacks the permission
        if type(left) == 'number' and left > tonumber(ARGV[5]) then -- this server's clock has gone back
            redis.call('PEXPIRE', RUNNING, ARGV[5])
        end
        return is_of(mark) and 'running' or 'reused'
    end
    redis.call('SET', RUNNING, own, 'PX', ARGV[5])
    return 'begun'
end

if mark and mark ~= own then
    return 0
end
if what == 'free' then
    return redis.call('DEL', RUNNING)
end
if kept(id) then
    return 0
end
if what == 'renew' then  -- also restores a lease that the server has lost, if the key was not used in the meantime
    redis.call('DEL', RUNNING .. ':full') -- for a server that is full: see settle.lua
    redis.call('SET', RUNNING, own, 'PX', ARGV[5])
    return 1
end
put(id, ARGV[7], ARGV[5], ARGV[6])
settle()
redis.call('DEL', RUNNING)
return 1
