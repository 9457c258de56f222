-- KEYS  1  tag
-- ARGV  any number of: endpoint that the caller has, what it hears of.
-- Returns the endpoints that any process has, or had lately, each with what it hears of.

local KNOWN_MS = 3600000
local endpoints, found = KEYS[1] .. ':webhooks:endpoints', {}

insist(KEYS[1])
for i = 1, #ARGV, 2 do
    redis.call('HSET', endpoints, ARGV[i], string.format('%.0f', now) .. ' ' .. ARGV[i + 1])
end
redis.call('PEXPIRE', endpoints, KNOWN_MS)
local known = redis.call('HGETALL', endpoints)
for i = 1, #known, 2 do
    local at, hears = string.match(known[i + 1], '^(%d+) (.*)$')
    if tonumber(at) < now - KNOWN_MS then
        redis.call('HDEL', endpoints, known[i])
    else
        if tonumber(at) > now then -- this server's clock has gone back
            redis.call('HSET', endpoints, known[i], string.format('%.0f', now) .. ' ' .. hears)
        end
        found[#found + 1] = {known[i], hears}
    end
end
return found
