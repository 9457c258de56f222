-- ARGV  'jobs' or 'jobs:<owner>', where to go on or '+inf', a status or '', a lane or '', how many at most.
-- Returns where to go on after these, or '', then jobs, briefly, newest first. Looks at no more than a page.

local index, before, status, lane, most = unpack(ARGV, OWN_ARGUMENTS)
local PAGE = 500
local page = redis.call('ZREVRANGEBYSCORE', key(index), before, '-inf', 'WITHSCORES', 'LIMIT', 0, PAGE)
local found = {#page == 2 * PAGE and '(' .. page[#page] or ''}

for i = 1, #page, 2 do
    if #found > tonumber(most) then
        break
    end
    local its = redis.call('HMGET', key('job', page[i]), 'status', 'lane')
    if (status == '' or its[1] == status) and (lane == '' or its[2] == lane) then
        found[#found + 1] = show(page[i], true) or nil
    end
end
return found
