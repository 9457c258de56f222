-- Returns the time, in ms; since when no job is handed out, in ms, or nothing; then of every lane: name, how many are
-- queued, how many in progress, how many ms ago the oldest that waits was accepted, how many ended lately, in how many
-- ms, and whether a worker that serves its model runs (1 or 0).

local found = {now, redis.call('GET', key('drained'))}
for i, lane in ipairs(redis.call('SMEMBERS', key('lanes'))) do
    -- The first ends start the clock and do not count: nothing tells how long the jobs before them took. If there are
    -- no others, these count, as those of all the time that is looked at.
    local ended, since, first = 0, now, 0
    local ends = redis.call('HGETALL', key('ends', lane))
    for j = 1, #ends, 2 do
        local at = ends[j] * BUCKET_MS
        if at >= now - LATELY_MS and at < now then -- later ones: this server's clock has gone back
            ended = ended + ends[j + 1]
            if at < since then
                since, first = at, ends[j + 1]
            end
        end
    end
    if ended > first + 0 then
        ended = ended - first
    else
        since = now - LATELY_MS
    end
    local oldest = redis.call('ZRANGE', key('ages', lane), 0, 0, 'WITHSCORES')[2] or false
    found[i + 2] = {
        lane,
        redis.call('ZCARD', key('ages', lane)),
        tonumber(redis.call('HGET', key('running'), lane) or 0),
        oldest and math.max(0, now - oldest),
        ended,
        now - since,
        is_worked(lane) and 1 or 0
    }
end
return found
