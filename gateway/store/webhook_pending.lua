-- KEYS  1  tag
-- ARGV  endpoints. Returns how many deliveries each has.

local counts = {}
for i, endpoint in ipairs(ARGV) do
    counts[i] = redis.call('ZCARD', KEYS[1] .. ':webhooks:due:' .. endpoint)
end
return counts
