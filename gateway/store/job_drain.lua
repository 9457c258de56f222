-- ARGV  1 to hand out no more jobs, 0 to hand them out again.

local order = ARGV[OWN_ARGUMENTS]

insist(TAG)
if order == '1' then
    redis.call('SET', key('drained'), string.format('%.0f', now), 'NX')
elseif redis.call('DEL', key('drained')) == 1 then
    redis.call('PUBLISH', key('work'), '')
end
