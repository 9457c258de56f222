-- Returns of every lane: name, how many are queued, how many in progress, how many ms ago the oldest that waits
-- was accepted, how many ended lately, and how many ms that is.

local found = {}
for i, lane in ipairs(redis.call('SMEMBERS', key('lanes'))) do
    local ended, since = 0, now
    local ends = redis.call('HGETALL', key('ends', lane))
    for j = 1, #ends, 2 do
        local at = ends[j] * BUCKET_MS
        if at >= now - LATELY_MS then
            ended, since = ended + ends[j + 1], math.min(since, at)
        end
    end
    local oldest = redis.call('ZRANGE', key('ages', lane), 0, 0, 'WITHSCORES')[2] or false
    found[i] = {
        lane,
        redis.call('ZCARD', key('ages', lane)),
        tonumber(redis.call('HGET', key('running'), lane) or 0),
        oldest and math.max(0, now - oldest),
        ended,
        math.max(BUCKET_MS, now - since)
    }
end
return found
