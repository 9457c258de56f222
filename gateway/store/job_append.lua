-- ARGV  id, token of its claim, number, 1 if the answer begins anew with it, data.
-- Returns 1, also if the chunk is there already; 0 if the claim does not hold the job; -1 if there is a gap.

local id, token, number, restarts, data = unpack(ARGV, OWN_ARGUMENTS)
local job = load(id)
number = tonumber(number)

if not holds(job, token) then
    return 0
end
if number < tonumber(job.chunks) then
    return 1
end
if number > tonumber(job.chunks) then
    return -1
end
insist(TAG)
redis.call(
    'XADD', key('chunks', id), '0-' .. string.format('%.0f', number + 1),
    'attempt', job.attempt, 'restarts', restarts, 'data', data
)
set(job, {chunks = number + 1, bytes = job.bytes + #data})
charge(job.owner, 0, #data)
tell(job)
return 1
